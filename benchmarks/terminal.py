"""A picture of a command in a terminal: python benchmarks/terminal.py 80 OUT.png ludus train tickets

Runs the command in a terminal of that many columns, and draws the screen at its end. Needs rsvg-convert
(Debian: librsvg2-bin), Pillow and DejaVu Sans Mono; without a picture's name, the screen is printed as text.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from io import StringIO

from PIL import Image
from rich.console import Console
from rich.text import Text

_CONTROL = re.compile(r"\x1b\[(\d*)([A-HJK])|\x1b\[\?\d+[hl]|(\r)|(\n)")


def run(command: list[str], columns: int) -> str:
    """What the command writes to a terminal."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side)
    os.close(side)
    written = bytearray()
    try:
        while part := os.read(main, 65536):
            written += part
    except OSError:  # the terminal is closed by its last user
        pass
    process.wait()
    return written.decode(errors="replace")


def screen(written: str) -> list[str]:
    """The lines that stay, with their colours: what erases lines and moves up is obeyed."""
    lines, row, place = [""], 0, 0
    for match in re.finditer(rf"{_CONTROL.pattern}|([^\x1b\r\n]+|\x1b\[[\d;]*m|\x1b)", written):
        number, code, is_return, is_newline, text = match.groups()
        if is_newline:
            row, place = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif is_return:
            place = 0
        elif code == "A":
            row = max(0, row - int(number or 1))
        elif code == "K":
            lines[row] = ""
        elif text:
            lines[row] = text if place == 0 else lines[row] + text
            place = 1
    return lines


def main(columns: int, image: str | None, command: list[str]) -> None:
    lines = [Text.from_ansi(line) for line in screen(run(command, columns))]
    console = Console(
        record=True, width=columns, file=StringIO(), color_system="truecolor", force_terminal=True
    )
    for line in lines:
        line.rstrip()
        console.print(line, soft_wrap=True)
    if image is None:
        print(console.export_text())
        return
    svg = console.export_svg(title=" ".join(command)).replace("Fira Code", "DejaVu Sans Mono")
    svg = svg.replace("<text ", '<text xml:space="preserve" ')
    subprocess.run(["rsvg-convert", "--zoom=1.2", "-o", image], input=svg.encode(), check=True)
    Image.open(image).quantize(64).save(image, optimize=True)


if __name__ == "__main__":
    first, *rest = sys.argv[2:]
    is_image = first.endswith(".png")
    main(int(sys.argv[1]), first if is_image else None, rest if is_image else [first, *rest])
