"""Pieces of Markdown that the CPU and the GPU part of the report share."""

import re


def table(head, rows):
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows]) + "\n"


def slug(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def scientific(value):
    return "-" if value is None else f"{value:.1e}"


def milliseconds(value):
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def percent(value):
    return "-" if value is None else f"{100 * value:.0f} %"


def size_of(name):
    """Orders cases by their numbers: 512x32 before 2048x32, N1xH32 before N64xH32."""
    return tuple(int(x) for x in re.findall(r"\d+", name))


def best_ms(record):
    """What a call on the CPU takes at best. With one thread it is the least processor time, which
    other programs do not add to; several threads wait for each other, so that only the clock on
    the wall says how long they took."""
    if record["threads"] == 1:
        return record.get("min_cpu_ms", record["min_ms"])
    return record["min_ms"]


def is_users(record):
    """Is this what a user gets who chooses nothing? Else run.py's --path chose the kernel."""
    return record.get("path", "auto") == "auto"


def ours_first(impl):
    return not impl.startswith("flash_kda"), impl


class Runs:
    """A letter for each commit, compiler and day, so that every row says where it is from."""

    def __init__(self, found):
        keys = sorted({self.key(r) for r in found}, key=lambda key: (key[2], key))
        self.letters = {key: self.letter(i) for i, key in enumerate(keys)}
        self.found = found

    @staticmethod
    def key(record):
        return record["commit"], record["compiler"], record["date"][:10]

    @staticmethod
    def letter(i):
        return chr(ord("A") + i % 26) * (i // 26 + 1)

    def __getitem__(self, record):
        return self.letters[self.key(record)]

    def text(self):
        rows = []
        for key, letter in self.letters.items():
            own = [r for r in self.found if self.key(r) == key]
            loads = [x for r in own for x in r.get("load") or []]
            driver = sorted({r["driver"] for r in own if r["driver"]})
            rows.append(
                (
                    letter,
                    f"`{key[0]}`",
                    f"{min(r['date'] for r in own)} to {max(r['date'] for r in own)}",
                    key[1],
                    ", ".join(driver) or "-",
                    f"{min(loads):.1f} to {max(loads):.1f}" if loads else "-",
                    len(own),
                )
            )
        head = ("run", "commit", "date", "compiler", "driver", "load average", "records")
        return table(head, rows)
