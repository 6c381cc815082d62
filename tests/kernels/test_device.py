import torch

from mtpkit.kernels.device import as_rows, with_rows


def test_only_what_has_no_rows_is_copied():
    wide = torch.randn(4, 3, 10)
    for rows, view in ((with_rows, wide[:, 1, 2:7]), (with_rows, wide[..., :5]), (as_rows, wide[:, :, 2:7])):
        have = rows(view)
        assert have.data_ptr() == view.data_ptr() and torch.equal(have.view_as(view), view)
    for rows, view in ((with_rows, wide.mT), (as_rows, wide[..., ::2]), (as_rows, wide.transpose(0, 1))):
        have = rows(view)
        assert have.stride(-1) == 1 and torch.equal(have.view_as(view), view)
    assert as_rows(wide).shape == (12, 10)
