"""Pictures of letters and digits, drawn from the fonts that matplotlib brings along.

    python benchmarks/data/glyphs.py --to benchmarks/generated/glyphs.npz

Each character of each font once, in the middle of 48 x 48 pixels, as one compressed file of numpy.
`small_models.py` turns, sizes, shades and disturbs them again for every batch. Needs matplotlib and
Pillow, and neither torch nor a network; the same versions give the same pictures.
"""

from __future__ import annotations

import argparse
import string
import sys
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import GENERATED

CHARACTERS = string.ascii_uppercase + string.digits
FONTS = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "STIXGeneral")
STYLES = ("", "-Bold", "-Oblique", "-BoldOblique", "-Italic", "-BoldItalic", "Bol", "BolIta")
OTHERS = ("STIXGeneralItalic", "cmr10", "cmss10", "cmtt10", "cmb10", "cmti10")
SIDE = 48
LETTER = 34
"""Pixels of the longer side of a character."""


def fonts() -> list[Path]:
    """Return the text fonts of matplotlib, by name."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = [family + style for family in FONTS for style in STYLES] + list(OTHERS)
    found = sorted({folder / f"{name}.ttf" for name in names})
    return [path for path in found if path.exists()]


def draw(path: Path, character: str) -> numpy.ndarray:
    """Return one character, (SIDE, SIDE) uint8, its longer side LETTER pixels."""
    from PIL import Image, ImageDraw, ImageFont

    big = 4 * LETTER
    font = ImageFont.truetype(str(path), big)
    left, top, right, bottom = font.getbbox(character)
    picture = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
    ImageDraw.Draw(picture).text((1 - left, 1 - top), character, fill=255, font=font)
    scale = LETTER / max(picture.size)
    width, height = (max(1, round(scale * length)) for length in picture.size)
    small = picture.resize((width, height), Image.Resampling.BOX)
    whole = Image.new("L", (SIDE, SIDE))
    whole.paste(small, ((SIDE - width) // 2, (SIDE - height) // 2))
    return numpy.asarray(whole)


def build(to: Path) -> tuple[int, int]:
    """Write all characters of all fonts; return how many fonts and characters."""
    found = fonts()
    drawn = numpy.stack([numpy.stack([draw(path, each) for each in CHARACTERS]) for path in found])
    to.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez_compressed(to, pictures=drawn, fonts=[path.stem for path in found])
    return drawn.shape[0], drawn.shape[1]


def main() -> None:
    """Build the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=GENERATED / "glyphs.npz")
    given = parser.parse_args()
    count, characters = build(given.to)
    print(f"{count} fonts, {characters} characters, {given.to.stat().st_size} bytes in {given.to}")


if __name__ == "__main__":
    main()
