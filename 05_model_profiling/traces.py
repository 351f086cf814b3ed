"""What a PyTorch trace of Lightning's loop says about the time of a step.

    uv run python traces.py TRACE.json.gz

reads one and prints where a step's time goes, the longest operators and gaps, and faults.

A trace is a list of events with a name, a start and a duration. Lightning's spans begin
with [pl][profile]; what torch computes are operators, such as aten::convolution. Events lie
inside each other, so each has a time of its own: the time in which no event inside it runs.
"""

import argparse
import gzip
import json
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from errors import first_line, refuse

DATA = "waiting for data"
TRANSFER = "copy to the device"
CALLBACKS = "callbacks, logging, checkpoints"
READS = "values read by Python"
COMMUNICATION = "communication"
COMPILING = "compiling"
LOOP = "the loop around it"
COPIES = "copies"
OVERHEAD = "small operators and Python"
PYTHON = "Python without operators"

PHASES = {  # by the last word of Lightning's span
    "train_dataloader_next": DATA,
    "batch_to_device": TRANSFER,
    "transfer_batch_to_device": TRANSFER,
    "training_step": "forward",
    "backward": "backward",
    "on_before_optimizer_step": "optimizer",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "lr_scheduler_step": "optimizer",
    "save_checkpoint": CALLBACKS,
}
ADVICE = {
    DATA: "measure the loader alone; chapter 4's diagnose.py says what it waits for",
    READS: "read several values at once, and every N steps",
    COPIES: "keep one dtype and one order in memory; drop .clone() and .contiguous()",
    OVERHEAD: "one operator on a whole tensor instead of a loop; a larger batch",
    PYTHON: "the advanced profiler's files name the function",
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
COLLECTIVES = ("c10d::", "_c10d_functional::")
SPAN = "[pl][profile]"
SMALL = (
    50  # microseconds: starting a shorter operator costs about as much as running it
)
ROUNDING = 0.2  # microseconds: events that follow each other may overlap by this
LONG = 1000  # microseconds: so long a gap is no overhead of operators
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
NAMED_FROM = 0.2  # a smaller share of the time is no fault


@dataclass
class Event:
    """A span or an operator of the thread that trains; times in microseconds."""

    name: str
    start: float
    end: float
    is_operator: bool = False
    place: str = ""  # the innermost line outside torch, if the trace has stacks
    phase: str = LOOP
    in_optimizer: bool = False  # inside the step of one of torch's
    inside: list["Event"] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """A time in which no event inside `event` runs."""

    event: Event
    is_last: bool  # the event ends with it
    duration: float  # microseconds
    phase: str
    cause: str  # of ADVICE; "" where it is work
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


def load(path: Path) -> list[dict]:
    """The events of a .json or .json.gz that have a duration."""
    opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    with opened as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def is_forward(event: dict) -> bool:
    """Whether it is Lightning's span of a training_step."""
    return (
        event["name"].startswith(SPAN) and last_word(event["name"]) == "training_step"
    )


def last_word(name: str) -> str:
    """Of a span: [pl][profile][Strategy]DDPStrategy.backward is backward."""
    return name.rpartition("]")[2].rpartition(".")[2]


def find_place(stack: str) -> str:
    """The innermost line of a call stack that is not in torch."""
    elsewhere = ("torch/", "<", "contextlib.py")
    for line in stack.replace("\\", "/").split(";"):
        if line and not line.startswith(elsewhere):
            return line
    return ""


def find_phase(event: Event, around: Event) -> str:
    """The phase that an event's name tells, or else that of the event around it."""
    name = event.name
    if name.startswith(f"{SPAN}[Callback]"):
        return CALLBACKS
    if name.startswith(SPAN):
        return PHASES.get(last_word(name), around.phase)
    if name.startswith(COLLECTIVES):
        return COMMUNICATION
    if name.endswith("(dynamo_timed)"):
        return COMPILING
    # torch's optimizers read the count of their steps, which the CPU has.
    in_other = around.in_optimizer or around.phase == DATA
    if name == "aten::item" and not in_other:
        return READS
    return around.phase


def read_events(raw: list[dict]) -> tuple[Event, int]:
    """The main thread's events, inside one that spans them all, and the number of steps.

    They begin where the first training_step in the trace ends, and end where the last one
    does: whole turns of Lightning's loop, all of whose spans are in the trace.
    """
    forward = [event for event in raw if is_forward(event)]
    if len(forward) < 2:
        raise ValueError("the trace has fewer than two training steps")
    threads = {forward[0]["tid"]}
    for event in raw:  # with a GPU, the backward pass has a thread of its own
        if event["name"].startswith("autograd::engine"):
            threads.add(event["tid"])
    ends = sorted(step["ts"] + step["dur"] for step in forward)
    whole = Event("trace", ends[0], ends[-1])
    around = [whole]
    for entry in sorted(raw, key=lambda event: (event["ts"], -event["dur"])):
        of_kind = entry.get("cat") in ("cpu_op", "user_annotation")
        # torch's own mark of a step begins and ends in the middle of other events.
        if (
            not of_kind
            or entry["tid"] not in threads
            or "ProfilerStep" in entry["name"]
        ):
            continue
        start = max(entry["ts"], whole.start)
        end = min(entry["ts"] + entry["dur"], whole.end)
        if end <= start:
            continue
        event = Event(entry["name"], start, end, entry["cat"] == "cpu_op")
        while event.start >= around[-1].end - ROUNDING and len(around) > 1:
            around.pop()
        event.end = min(event.end, around[-1].end)
        event.in_optimizer = around[-1].in_optimizer and not event.name.startswith(SPAN)
        event.in_optimizer |= event.name.startswith("Optimizer.step#")
        if not event.name.startswith(SPAN):  # a span's own lines are Lightning's
            event.place = find_place(entry["args"].get("Call stack", ""))
        event.phase = find_phase(event, around[-1])
        around[-1].inside.append(event)
        around.append(event)
    return whole, len(forward) - 1


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
    before_read = after is not None and after.phase == READS and duration < SMALL
    if after_send and phase != DATA:
        phase = COMMUNICATION  # the other ranks are waited for
    elif before_read and phase != DATA:
        phase = READS  # Python that gets the tensor whose value is read
    cause = ""
    if phase in ADVICE:
        cause = phase
    elif event.name in COPYING and phase != TRANSFER:
        cause = COPIES
    elif not event.is_operator and duration > LONG:
        cause = PYTHON
    elif not event.is_operator or event.end - event.start < SMALL:
        cause = OVERHEAD
    following = after.name if after else "its end"
    return Piece(event, after is None, duration, phase, cause, following)


def find_faults(pieces: list[Piece]) -> list[Finding]:
    """Causes that take a large share of the time, the largest first."""
    whole = sum(piece.duration for piece in pieces)
    total: Counter[str] = Counter()
    places: dict[str, Counter[str]] = defaultdict(Counter)
    for piece in pieces:
        total[piece.cause] += piece.duration
        place = piece.event.place or piece.event.name
        places[piece.cause][place] += piece.duration
    findings = []
    for cause, duration in total.most_common():
        if cause and duration > NAMED_FROM * whole:
            place = places[cause].most_common(1)[0][0]
            findings.append(Finding(cause, duration / whole, place))
    return findings


def find_waits(pieces: list[Piece], steps: int) -> list[tuple[str, str, float]]:
    """Values read with .item(), and collectives: a GPU or other ranks are waited for."""
    found: Counter[tuple[str, str]] = Counter()
    for piece in pieces:
        event = piece.event
        is_read = event.phase == READS and event.name == "aten::item"
        if piece.is_last and (is_read or event.name.startswith(COLLECTIVES)):
            found[event.name, event.place] += 1
    return [(*key, count / steps) for key, count in found.most_common(5)]


def measure_busy(raw: list[dict], whole: Event) -> float | None:
    """The share of the time in which a GPU computes, however much of it."""
    kernels = []
    for event in raw:
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


def read_trace(raw: list[dict]) -> Report:
    """All that a trace says of a step."""
    whole, steps = read_events(raw)
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
    busy = measure_busy(raw, whole)
    findings = find_faults(pieces)
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
    order = [*dict.fromkeys(PHASES.values()), READS, COMMUNICATION, COMPILING, LOOP]
    for phase in order:
        lines.append(f"  {phase:34}{report.phases.get(phase, 0):6.1%}")
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
        lines.append(
            "No fault found: the step computes. How fast could it? roofline.py"
        )
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
        refuse(f"{args.trace}: no such file; give a trace, such as one in results/")
    except NOT_A_TRACE as error:
        reason = f"no trace of Lightning's loop ({first_line(error)})"
        refuse(f"{args.trace}: {reason}; give one that profiler.py wrote")
    print(describe(report))
    return report


if __name__ == "__main__":
    main()
