"""The conversion benchmark: its figures hang together, nothing stays behind, and wrong tensors are
refused."""

import shutil

import pytest

from mtpkit.bench import convert
from mtpkit.bench.convert import measure_conversion
from mtpkit.bench.settings import ConvertBenchConfig
from mtpkit.errors import MtpkitError, UserError
from tests.checkpoint.builders import edit

SMALL = ConvertBenchConfig(gigabytes=0.004)


def test_the_figures_hang_together(tmp_path):
    result = measure_conversion(SMALL, tmp_path)
    rows = {row.stage: row for row in result.rows}
    assert [*rows] == ["copy of the files", "import", "stitch --link", "export"]
    copy = rows["copy of the files"]
    stitched = rows["stitch --link"]
    assert copy.copy_share == 1 and 3.5e6 < copy.nbytes < 4.5e6
    for row in result.rows:
        assert row.bytes_per_s == pytest.approx(row.nbytes / row.seconds)
        assert row.copy_share == pytest.approx(row.bytes_per_s / copy.bytes_per_s)
        assert 10**8 < row.peak_memory < 10**10
        assert row.stage == stitched.stage or row.nbytes <= row.written < 2 * row.nbytes
    assert stitched.written < 0.5 * stitched.nbytes
    assert result.machine is not None and len(result.tables()[0].columns) == 7
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_tensor_is_refused(tmp_path, monkeypatch):
    export = convert.export_checkpoint

    def damaging(source, destination):
        export(source, destination)
        edit(destination, lambda tensors: tensors["lm_head.weight"][0].neg_())

    monkeypatch.setattr(convert, "export_checkpoint", damaging)
    monkeypatch.setattr(convert, "_COMPARED", 10**6)
    with pytest.raises(MtpkitError, match=r"differ from the original's: lm_head\.weight"):
        measure_conversion(SMALL, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_small_disk_is_refused(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**7)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"0\.0 GB free, too little"):
        measure_conversion(ConvertBenchConfig(gigabytes=1), tmp_path)


def test_a_place_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        UserError,
        match="disk is no directory: make it, or name another place on the disk by --direct",
    ):
        measure_conversion(ConvertBenchConfig(gigabytes=0.01), tmp_path / "disk")
