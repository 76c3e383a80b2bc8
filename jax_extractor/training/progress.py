"""How far training is: a bar on a terminal, plain lines anywhere else."""

import sys
import time
from collections.abc import Mapping
from typing import SupportsFloat

from tqdm import tqdm


class Progress:
    """Shows the step, the losses, the speed and the time left; a context manager.

    Args:
        total: the step at which training ends.
        start: the step it starts from, which is not 0 when a run is resumed.
        stream: where to show it; a bar if that is a terminal. Standard error when None.
    """

    def __init__(self, total: int, start: int = 0, stream=None):
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._first = (start, time.monotonic())
        self._timed = False
        self._bar = None
        if self._stream.isatty():
            layout = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt}{postfix}"
            self._bar = tqdm(
                total=total, initial=start, file=self._stream, dynamic_ncols=True, bar_format=layout
            )

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def update(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Shows a step with its `loss`, `val_loss` and `tokens_per_second`, where it has them."""
        parts = [f"{n} {float(metrics[n]):.3f}" for n in ("loss", "val_loss") if n in metrics]
        if "tokens_per_second" in metrics:
            parts.append(f"{_short(float(metrics['tokens_per_second']))} tokens/s")
        left = self._time_left(step)
        if left is not None:
            parts.append(f"{_duration(left)} left")
        if self._bar is None:
            self.line("  ".join([f"step {step}/{self._total}", *parts]))
        else:
            self._bar.set_postfix_str("  ".join(parts), refresh=False)
            self._bar.n = step
            self._bar.refresh()

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        """Ends the bar's line."""
        if self._bar is not None:
            self._bar.close()

    def _time_left(self, step: int) -> float | None:
        """Seconds, at the pace since the first update, which alone includes compilation."""
        now = time.monotonic()
        first, began = self._first
        if not self._timed and step > first:
            self._first, self._timed = (step, now), True
        return (self._total - step) * (now - began) / (step - first) if step > first else None


def _short(number: float) -> str:
    """12345.6 as 12.3k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    """80.4 as 1m20s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
