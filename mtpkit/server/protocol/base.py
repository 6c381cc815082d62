"""What all bodies are made of."""

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A response, or a part of one. What is not set is left out where it is sent in a stream."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class RequestBody(Body):
    """A request. Fields that it does not have are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow")
