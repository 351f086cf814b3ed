"""A PyTorch trace as events inside each other, each in a phase of the training.

A trace is a list of events with a name, a start and a duration. What torch computes are
operators, such as aten::convolution; the rest are spans. Lightning's spans begin with
[pl][profile]. In a loop in plain PyTorch the spans are your own record_function("forward").
"""

import gzip
import json
import math
import re
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

DATA = "waiting for data"
TRANSFER = "copy to the device"
CALLBACKS = "callbacks, logging, checkpoints"
READS = "values read by Python"
COMMUNICATION = "communication"
COMPILING = "compiling"
LOOP = "the loop around it"
OPTIMIZER = "optimizer"

PHASES = {  # by the last word of Lightning's span
    "train_dataloader_next": DATA,
    "batch_to_device": TRANSFER,
    "transfer_batch_to_device": TRANSFER,
    "training_step": "forward",
    "backward": "backward",
    "on_before_optimizer_step": OPTIMIZER,
    "optimizer_step": OPTIMIZER,
    "optimizer_zero_grad": OPTIMIZER,
    "lr_scheduler_step": OPTIMIZER,
    "save_checkpoint": CALLBACKS,
}
COLLECTIVES = ("c10d::", "_c10d_functional::")
SPAN = "[pl][profile]"
STEP = (
    "ProfilerStep#"  # torch's own span of a step, from one profiler.step() to the next
)
LOADER = "enumerate(DataLoader)#"  # torch's own span of a batch
OF_TORCH = re.compile(  # spans that no reader named
    r"Optimizer\.|DistributedDataParallel|FullyShardedDataParallel|Torch|Pregraph|## "
    r"|(gloo|nccl|ucc|mpi):|.*(#|::|_data: |\(dynamo_timed\))"
)
ROUNDING = 0.2  # microseconds: events that follow each other may overlap by this
ITEM_BYTES = {
    "bool": 1,
    "unsigned char": 1,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "float": 4,
    "long int": 8,
    "double": 8,
}


@dataclass(frozen=True)
class Machine:
    """What the least work cost where and when a trace was made.

    The default is for traces without a measurement: an operator on the book's machine.
    """

    empty_us: float = 4.0  # microseconds of an operator on one number, on average
    copy_rate: float | None = None  # bytes/s, read and written by a copy in memory


@dataclass(frozen=True)
class Trace:
    """The events that have a duration, as torch writes them, and their machine."""

    events: list[dict]
    machine: Machine = Machine()


@dataclass
class Event:
    """A span or an operator of the thread that trains; times in microseconds."""

    name: str
    start: float
    end: float
    is_operator: bool = False
    place: str = ""  # the innermost function outside torch, if the trace has stacks
    bytes_moved: int = 0  # by an operator, if the trace has shapes
    phase: str = LOOP
    in_optimizer: bool = False  # inside the step of one of torch's
    inside: list["Event"] = field(default_factory=list)


def load(path: Path) -> Trace:
    """Read a .json or .json.gz."""
    opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    with opened as file:
        content = json.load(file)
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    return Trace(events, Machine(**content.get("machine", {})))


def read_events(trace: Trace) -> tuple[Event, int]:
    """The main thread's events, inside one that spans them all, and the number of steps."""
    start, end, steps = find_steps(trace.events)
    threads = find_threads(trace.events)
    whole = Event("trace", start, end)
    around = [whole]
    for entry in sorted(trace.events, key=lambda each: (each["ts"], -each["dur"])):
        of_kind = entry.get("cat") in ("cpu_op", "user_annotation")
        # torch's own mark of a step begins and ends in the middle of other events.
        is_mark = entry["name"].startswith(STEP)
        if is_mark or not of_kind or entry["tid"] not in threads:
            continue
        event = make_event(entry)
        event.start = max(event.start, start)
        event.end = min(event.end, end)
        if event.end <= event.start:
            continue
        while event.start >= around[-1].end - ROUNDING and len(around) > 1:
            around.pop()
        put_inside(event, around[-1])
        around.append(event)
    return whole, steps


def find_steps(events: list[dict]) -> tuple[float, float, int]:
    """Where whole steps begin and end, and how many they are.

    With Lightning they begin where the first training_step in the trace ends, and end where
    the last one does: whole turns of its loop, all of whose spans are in the trace.
    Otherwise they are torch's own spans of steps.
    """
    if any(event["name"].startswith(SPAN) for event in events):
        forward = [event for event in events if is_forward(event)]
        if len(forward) < 2:
            raise ValueError("it has fewer than two training steps")
        ends = sorted(event["ts"] + event["dur"] for event in forward)
        return ends[0], ends[-1], len(ends) - 1
    marks = [event for event in events if is_step(event)]
    if not marks:
        raise ValueError("it has no whole step")
    start = min(event["ts"] for event in marks)
    end = max(event["ts"] + event["dur"] for event in marks)
    if not 0 < end - start < math.inf:
        raise ValueError("its steps take no time, or for ever")
    return start, end, len(marks)


def is_forward(event: dict) -> bool:
    """Whether it is Lightning's span of a training_step."""
    is_span = event["cat"] == "user_annotation" and event["name"].startswith(SPAN)
    return is_span and last_word(event["name"]) == "training_step"


def is_step(event: dict) -> bool:
    """Whether it is torch's own span of a step."""
    return event["cat"] == "user_annotation" and event["name"].startswith(STEP)


def last_word(name: str) -> str:
    """Of a span: [pl][profile][Strategy]DDPStrategy.backward is backward."""
    return name.rpartition("]")[2].rpartition(".")[2]


def find_threads(events: list[dict]) -> set[int]:
    """The thread that trains and, with a GPU, that of its backward pass."""
    steps = [event for event in events if is_forward(event) or is_step(event)]
    threads = {steps[0]["tid"]}
    for event in events:
        if event["name"].startswith("autograd::engine"):
            threads.add(event["tid"])
    return threads


def make_event(entry: dict) -> Event:
    """An event alone, of what torch wrote."""
    args = entry["args"]
    event = Event(entry["name"], entry["ts"], entry["ts"] + entry["dur"])
    event.is_operator = entry["cat"] == "cpu_op"
    event.bytes_moved = count_bytes(args)
    if not event.name.startswith(SPAN):  # a span's own lines are Lightning's
        event.place = find_place(args.get("Call stack", ""))
    return event


def put_inside(event: Event, around: Event) -> None:
    """Put an event into the one around it, which decides part of what it is."""
    event.end = min(event.end, around.end)
    is_span = event.name.startswith(SPAN)
    event.in_optimizer = around.in_optimizer and not is_span
    event.in_optimizer |= event.name.startswith("Optimizer.step#")
    event.phase = find_phase(event, around)
    around.inside.append(event)


def find_phase(event: Event, around: Event) -> str:
    """The phase that an event's name tells, or else that of the event around it."""
    name = event.name
    if name.startswith(f"{SPAN}[Callback]"):
        return CALLBACKS
    if name.startswith(SPAN):
        return PHASES.get(last_word(name), around.phase)
    if name.startswith(LOADER):
        return DATA
    if name.startswith("Optimizer.") and around.phase == LOOP:
        return OPTIMIZER
    if name.startswith(COLLECTIVES):
        return COMMUNICATION
    if name.endswith("(dynamo_timed)"):
        return COMPILING
    if not event.is_operator and not OF_TORCH.match(name):
        return name  # a reader's own
    # torch's optimizers read the count of their steps, which the CPU has.
    in_other = around.in_optimizer or around.phase == DATA
    if name == "aten::item" and not in_other:
        return READS
    return around.phase


def find_place(stack: str) -> str:
    """The innermost function of a call stack that is not in torch, and its file.

    The number that torch gives is where the function begins, or where it was when the
    trace began: not the line that called.
    """
    elsewhere = ("torch/", "<", "contextlib.py")
    for frame in stack.replace("\\", "/").split(";"):
        if frame and not frame.startswith(elsewhere):
            return re.sub(r"\(\d+\): ", ": ", frame)
    return ""


def count_bytes(args: dict) -> int:
    """Bytes of an operator's inputs, and of a result as large as they make it; 0: unknown.

    A trace does not say how large a result is. It is taken to be as large as the inputs
    spread over each other, which is right for sums and products, and too much for others.
    """
    if "Input Dims" not in args:
        return args.get("bytes", 0)  # a trace that slowdowns.py has kept has them
    shapes = []
    sizes = []
    items = [0]
    for shape, kind in zip(args["Input Dims"], args["Input type"]):
        if kind in ITEM_BYTES:
            items.append(ITEM_BYTES[kind])
            shapes.append(shape[::-1])
            sizes.append(math.prod(shape) * ITEM_BYTES[kind])
    result = math.prod(max(lengths) for lengths in zip_longest(*shapes, fillvalue=1))
    return sum(sizes) + result * max(items)
