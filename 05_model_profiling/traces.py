"""What a PyTorch trace says about the time of a training step.

    uv run python traces.py TRACE.json.gz

reads one and prints where a step's time goes, the longest operators and gaps, and faults.
trace_events.py says what a trace is. Each event has a time of its own: that in which no
event inside it runs.
"""

import argparse
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from trace_events import (
    CALLBACKS,
    COLLECTIVES,
    COMMUNICATION,
    COMPILING,
    DATA,
    PHASES,
    READS,
    TRANSFER,
    Event,
    Machine,
    Trace,
    load,
    read_events,
)

COPIES = "copies"
OVERHEAD = "small operators and Python"
PYTHON = "Python without operators"
SLOW = "an operator far below its roof"
WORK = ""  # no fault

ADVICE = {
    DATA: "measure the loader alone; chapter 4's diagnose.py says what it waits for",
    READS: "read several values at once, and every N steps",
    COPIES: "keep one dtype and one order in memory; drop .clone() and .contiguous()",
    OVERHEAD: "one operator on a whole tensor instead of a loop; a larger batch",
    PYTHON: "cProfile names the function; under Lightning, see the files in advanced/",
    SLOW: "another order in memory or dtype for it, if its kernel is slow in this one",
    COMPILING: "equal shapes in each step (drop_last), or compile with dynamic=True",
    COMMUNICATION: "send less, or less often: a larger batch, accumulation",
    CALLBACKS: "do it every N steps",
}
COPYING = {
    "aten::to",
    "aten::_to_copy",
    "aten::copy_",
    "aten::clone",
    "aten::contiguous",
}
ONE_PASS = re.compile(  # little more to compute than numbers to read and write
    r"aten::(.*norm|.*pool|.*upsample|.*_pad|.*softmax|.*dropout|.*[a-z]elu|silu|mish"
    r"|sigmoid|tanh|where|add|sub|mul|div|sum|mean|neg|sqrt|maximum|minimum|clamp)"
    r"(\d?d)?(_|$|_backward|_with_indices)"
)
SLOW_TIMES = 8  # as long as the least; most kernels take up to 5 times
NEAR = 50  # microseconds: Python so shortly before a read gets its tensor
NOT_A_TRACE = (
    OSError,
    EOFError,
    zlib.error,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    ArithmeticError,
    RecursionError,
)
NAMED_FROM = 0.2  # a smaller share of the time is no fault, but:
OTHER_LIMITS = {
    PYTHON: 0.3,  # a small step has some
    SLOW: 0.12,  # networks without a fault had up to 0.08
}
WORTH_SAYING = 0.05  # a smaller share of waiting needs no explanation
SHOWN_FROM = 0.0005  # a smaller share would be shown as 0.0%


@dataclass(frozen=True)
class Piece:
    """A time in which no event inside `event` runs."""

    event: Event
    is_last: bool  # the event ends with it
    duration: float  # microseconds
    phase: str
    cause: str  # of ADVICE, or WORK: before share_out
    following: str  # what comes next


@dataclass(frozen=True)
class Finding:
    """A fault: its share of the time, and where most of it is spent."""

    cause: str
    share: float
    place: str


@dataclass(frozen=True)
class Report:
    """What a trace says of a step."""

    steps: int
    step_ms: float
    phases: dict[str, float]  # shares of the time
    operators: list[tuple[str, float, float]]  # share of their own time, number a step
    gaps: list[tuple[str, float, str]]  # phase, milliseconds, what comes next
    waits: list[tuple[str, str, float]]  # operator, place, number a step
    findings: list[Finding]
    device_busy: float | None  # None without a GPU

    @property
    def first(self) -> str:
        """The cause that takes the largest share; "none" if no cause takes much."""
        return self.findings[0].cause if self.findings else "none"


def cut(whole: Event) -> list[Piece]:
    """An event's time in pieces, each with what it was spent on: they add up to the event."""
    pieces = []
    waiting = [whole]
    while waiting:
        event = waiting.pop()
        waiting += event.inside
        clock = event.start
        before = None
        for inner in event.inside:
            pieces.append(make_piece(event, before, inner, inner.start - clock))
            clock = inner.end
            before = inner
        pieces.append(make_piece(event, before, None, event.end - clock))
    return pieces


def make_piece(
    event: Event, before: Event | None, after: Event | None, duration: float
) -> Piece:
    """A piece of an event's own time, between two of those inside it."""
    phase = event.phase
    after_send = before is not None and before.phase == COMMUNICATION
    before_read = after is not None and after.phase == READS and duration < NEAR
    if after_send and phase != DATA:
        phase = COMMUNICATION  # the other ranks are waited for
    elif before_read and phase != DATA:
        phase = READS  # Python that gets the tensor whose value is read
    cause = WORK
    if phase in ADVICE:
        cause = phase
    elif event.name in COPYING and phase != TRANSFER:
        cause = COPIES
    elif not event.is_operator:
        cause = PYTHON
    following = after.name if after else "its end"
    return Piece(event, after is None, duration, phase, cause, following)


def find_faults(pieces: list[Piece], machine: Machine) -> list[Finding]:
    """Causes that take a large share of the time, the largest first."""
    whole = sum(piece.duration for piece in pieces)
    total: Counter[str] = Counter()
    places: dict[str, Counter[str]] = defaultdict(Counter)
    for event, cause, duration in share_out(pieces, machine):
        total[cause] += duration
        places[cause][find_caller(event)] += duration
    findings = []
    for cause, duration in total.most_common():
        limit = OTHER_LIMITS.get(cause, NAMED_FROM)
        if cause != WORK and duration > limit * whole:
            place = places[cause].most_common(1)[0][0]
            findings.append(Finding(cause, duration / whole, place))
    return findings


def find_caller(event: Event) -> str:
    """An operator and the function that called it, or what is known of a span."""
    if event.is_operator and event.place:
        return f"{event.name}, called by {event.place}"
    return event.place or event.name


def share_out(
    pieces: list[Piece], machine: Machine
) -> Iterator[tuple[Event, str, float]]:
    """Events with a cause and microseconds: the pieces, of which some have two causes.

    An operator costs something however little it computes: as much as an empty one. That
    much of each operator, and of each time without one, is overhead. The rest is work or,
    without an operator, Python.
    """
    slow = find_slow(pieces, machine)
    left: dict[int, float] = defaultdict(lambda: machine.empty_us)  # by the event's id
    for piece in pieces:
        event = piece.event
        overhead = 0.0
        cause = piece.cause
        if cause == PYTHON:
            overhead = min(piece.duration, machine.empty_us)
        elif cause == WORK:
            overhead = min(piece.duration, left[id(event)])
            left[id(event)] -= overhead
            if (event.name, event.bytes_moved) in slow:
                cause = SLOW
        yield event, OVERHEAD, overhead
        yield event, cause, piece.duration - overhead


def find_slow(pieces: list[Piece], machine: Machine) -> set[tuple[str, int]]:
    """Operators that take far longer than their bytes need, each by its name and bytes.

    The least that one needs is the time of an empty operator and of a copy of its bytes.
    The median counts, because the system may stop any single one for a while. Where the
    trace has no shapes, or the work is not one pass over the bytes, nothing is known.
    """
    if machine.copy_rate is None:
        return set()
    own: Counter[int] = Counter()  # by the event's id
    events = {}
    for piece in pieces:
        if piece.event.bytes_moved and ONE_PASS.match(piece.event.name):
            own[id(piece.event)] += piece.duration
            events[id(piece.event)] = piece.event
    times = defaultdict(list)
    for key, event in events.items():
        times[event.name, event.bytes_moved].append(own[key])
    slow = set()
    for (name, bytes_moved), durations in times.items():
        least = machine.empty_us + 1e6 * bytes_moved / machine.copy_rate
        if median(durations) > SLOW_TIMES * least:
            slow.add((name, bytes_moved))
    return slow


def find_waits(pieces: list[Piece], steps: int) -> list[tuple[str, str, float]]:
    """Values read with .item(), and collectives: a GPU or other ranks are waited for."""
    found: Counter[tuple[str, str]] = Counter()
    for piece in pieces:
        event = piece.event
        is_read = event.phase == READS and event.name == "aten::item"
        if piece.is_last and (is_read or event.name.startswith(COLLECTIVES)):
            found[event.name, event.place] += 1
    return [(*key, count / steps) for key, count in found.most_common(5)]


def measure_busy(events: list[dict], whole: Event) -> float | None:
    """The share of the time in which a GPU computes, however much of it."""
    kernels = []
    for event in events:
        if event.get("cat") == "kernel" and "nccl" not in event["name"]:
            kernels.append(event)
    if not kernels:
        return None
    busy = 0.0
    clock = whole.start
    for kernel in sorted(kernels, key=lambda event: event["ts"]):
        begin = max(kernel["ts"], clock)
        end = min(kernel["ts"] + kernel["dur"], whole.end)
        busy += max(0, end - begin)
        clock = max(clock, end)
    return busy / (whole.end - whole.start)


def read_trace(trace: Trace) -> Report:
    """All that a trace says of a step."""
    whole, steps = read_events(trace)
    pieces = cut(whole)
    duration = whole.end - whole.start
    phases: Counter[str] = Counter()
    own: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    gaps = []
    for piece in pieces:
        phases[piece.phase] += piece.duration / duration
        if piece.event.is_operator:
            own[piece.event.name] += piece.duration / duration
            calls[piece.event.name] += piece.is_last
        else:
            gaps.append((piece.phase, piece.duration / 1e3, piece.following))
    gaps.sort(key=lambda gap: -gap[1])
    busy = measure_busy(trace.events, whole)
    machine = trace.machine
    if busy is not None:
        machine = replace(machine, copy_rate=None)  # that of the CPU
    findings = find_faults(pieces, machine)
    if busy is not None and busy > 1 - NAMED_FROM:
        findings = []  # whatever the CPU does meanwhile, the GPU does not wait for it
    operators = [
        (name, share, calls[name] / steps) for name, share in own.most_common(5)
    ]
    return Report(
        steps,
        duration / 1e3 / steps,
        dict(phases),
        operators,
        gaps[:3],
        find_waits(pieces, steps),
        findings,
        busy,
    )


def describe(report: Report) -> str:
    """A report as text."""
    lines = [f"{report.steps} steps of {report.step_ms:.1f} ms. Where their time goes:"]
    known = [*PHASES.values(), READS, COMMUNICATION, COMPILING]
    order = dict.fromkeys([*known, *report.phases])  # then the reader's own
    for phase in order:
        if report.phases.get(phase, 0) >= SHOWN_FROM:
            lines.append(f"  {phase:34}{report.phases[phase]:6.1%}")
    lines.append("Longest operators, by their own time:")
    for name, share, calls in report.operators:
        lines.append(f"  {name:34}{share:6.1%}  {calls:.0f} a step")
    lines.append("Longest times without an operator:")
    for phase, duration, following in report.gaps:
        lines.append(f"  {phase:34}{duration:6.1f} ms, before {following}")
    if report.waits:
        lines.append("Values read and collectives, a step:")
    for name, place, number in report.waits:
        lines.append(f"  {name:34}{number:6.0f}  {place}")
    if report.device_busy is not None:
        lines.append(f"The GPU runs a kernel in {report.device_busy:.0%} of the time")
    if not report.findings:
        waits = report.phases.get(DATA, 0)
        if waits > WORTH_SAYING:
            lines.append(
                f"No fault takes a fifth of the time; waiting for data: {waits:.0%}"
            )
        else:
            lines.append("No fault found: the step computes")
    for number, finding in enumerate(report.findings, 1):
        lines.append(f"{number}. {finding.cause}: {finding.share:.0%} of the time")
        lines.append(f"   most of it in {finding.place}")
        lines.append(f"   try: {ADVICE[finding.cause]}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> Report:
    """Read a trace and print what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help=".json or .json.gz")
    args = parser.parse_args(argv)
    try:
        report = read_trace(load(args.trace))
    except FileNotFoundError:
        parser.error(f"{args.trace}: no such file; give one that profiler.py wrote")
    except NOT_A_TRACE as error:
        cause = str(error).split("\n")[0] or type(error).__name__
        remedy = "give one of several steps that profiler.py wrote"
        parser.error(f"{args.trace}: no trace of a training ({cause}); {remedy}")
    print(describe(report))
    return report


if __name__ == "__main__":
    main()
