"""Terminal progress of a run: loss, acceptance of the first and last slot, speed, time left."""

from __future__ import annotations

import re
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """A live bar on a terminal; one plain line per report elsewhere (CI logs, nohup)."""

    def __init__(self, steps: int, start: int, *, enabled: bool) -> None:
        self.console = Console(highlight=False)
        self.enabled = enabled
        self.steps, self.start, self.began = steps, start, time.monotonic()
        self.bar: Bar | None = None
        if enabled and self.console.is_terminal:
            self.bar = Bar(
                TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self.console,
            )  # fmt: skip
            self.task = self.bar.add_task("train", total=steps, completed=start, text="")
            self.bar.start()

    def update(self, step: int, loss: float, metrics: dict[str, float]) -> None:
        """Report `step` completed steps."""
        if not self.enabled:
            return
        alphas = [value for key, value in metrics.items() if key.startswith("accept/alpha_")]
        speed = metrics.get("perf/tokens_per_s")
        text = f"loss {loss:.3f}  tau {metrics.get('accept/tau_expected', float('nan')):.2f}"
        if alphas:
            text += f"  alpha {alphas[0]:.2f}..{alphas[-1]:.2f}"
        if speed:
            text += f"  {speed:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, text=text)
        else:
            left = (self.steps - step) * (time.monotonic() - self.began) / max(1, step - self.start)
            self.console.print(f"step {step}/{self.steps}  {text}  {left / 60:.0f} min left")

    def note(self, step: int, metrics: dict[str, float]) -> None:
        """A validation line."""
        if self.enabled:
            chain = metrics.get("val/accept/greedy_chain")
            text = f"step {step}: validation tau {metrics.get('val/accept/tau_expected', float('nan')):.3f}"
            self.console.print(text if chain is None else f"{text}, greedy {1 + chain:.3f}")

    def rollouts(self, step: int, metrics: dict[str, float]) -> None:
        """A line on rollouts of the runtime."""
        if self.enabled:
            taus = [(re.fullmatch(r"eval/tau_t([0-9.]+)", key), value) for key, value in metrics.items()]
            text = ", ".join(f"{value:.3f} at T={found[1]}" for found, value in taus if found)
            self.console.print(f"step {step}: rollouts tau {text}")

    def close(self) -> None:
        """End the live bar."""
        if self.bar is not None:
            self.bar.stop()
