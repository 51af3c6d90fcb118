"""The figures of docs/cuda.md are drawn from the sizes that the kernels have."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import draw_cuda  # noqa: E402


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["draw_cuda.py", *map(str, arguments)])
    draw_cuda.main()


def test_figures_are_those_of_the_header(monkeypatch):
    main(monkeypatch, "--check")
    text = (draw_cuda.ROOT / "docs" / "cuda.md").read_text()
    assert all(f"(img/{name})" in text for name in draw_cuda.FIGURES)


@pytest.mark.parametrize("name", ["STAGES", "VALUE_BYTES", "IMAGE_BYTES", "IMAGE_P"])
def test_another_size_is_noticed(name, tmp_path, monkeypatch):
    text = draw_cuda.HEADER.read_text()
    value = draw_cuda.read_sizes(text)[name]
    header = tmp_path / "tile_image.h"
    header.write_text(text.replace(f" {name} = {value}", f" {name} = {value + 2}"))
    monkeypatch.setattr(draw_cuda, "HEADER", header)
    with pytest.raises(SystemExit, match="is not what tile_image.h says"):
        main(monkeypatch, "--check")


def test_sizes_are_the_operands(monkeypatch):
    """An operand's bytes end where the next one begins; together they are the image."""
    size = draw_cuda.read_sizes(draw_cuda.HEADER.read_text())
    parts = draw_cuda.regions(size)
    assert sum(count for _, count in parts) == size["IMAGE_BYTES"]
    assert all(count > 0 for _, count in parts)
