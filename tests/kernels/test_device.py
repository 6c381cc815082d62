import pytest
import torch

from mtpkit.kernels.device import as_rows, overlaps_kernels, with_rows


@pytest.mark.parametrize(("capability", "overlaps"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_kernels_overlap_from_hopper_on(monkeypatch, capability, overlaps):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    answer = overlaps_kernels.__wrapped__  # what other tests were told is kept
    assert answer(torch.device("cuda", 0)) == overlaps and not answer(torch.device("cpu"))


def test_only_what_has_no_rows_is_copied():
    wide = torch.randn(4, 3, 10)
    for rows, view in ((with_rows, wide[:, 1, 2:7]), (with_rows, wide[..., :5]), (as_rows, wide[:, :, 2:7])):
        have = rows(view)
        assert have.data_ptr() == view.data_ptr() and torch.equal(have.view_as(view), view)
    for rows, view in ((with_rows, wide.mT), (as_rows, wide[..., ::2]), (as_rows, wide.transpose(0, 1))):
        have = rows(view)
        assert have.stride(-1) == 1 and torch.equal(have.view_as(view), view)
    assert as_rows(wide).shape == (12, 10)
