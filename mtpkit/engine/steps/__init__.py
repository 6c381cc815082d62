"""One step: its plan, its inputs on the device, sampling and verification."""
