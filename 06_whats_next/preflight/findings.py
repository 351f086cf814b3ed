"""What a check before a run has found: green or red, and what to do about a red one."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from lightning.fabric import Fabric

from errors import CheckpointError, DataError, first_line


@dataclass(frozen=True)
class Finding:
    """What a check found. One with a remedy is red."""

    name: str
    text: str
    remedy: str = ""

    @property
    def is_red(self) -> bool:
        return bool(self.remedy)


def collect(
    fabric: Fabric, name: str, checks: Iterable[Finding], remedy: str
) -> list[Finding]:
    """What all ranks find by some checks, the same list on each rank.

    An error ends a rank's checks, and is a red finding called `name`; `remedy` is for
    errors that bring none of their own. Rank 0 prints its findings as they come.
    """
    found = []
    try:
        for finding in checks:
            found.append(finding)
            if fabric.is_global_zero:
                print_finding(finding)
    except Exception as error:  # whatever it is, the other ranks wait for this one
        found.append(explain(name, error, remedy))
        if fabric.is_global_zero:
            print_finding(found[-1])
    merged = merge(gather(fabric, found))
    if fabric.is_global_zero:
        for finding in merged:
            if finding not in found:  # of other ranks
                print_finding(finding)
    return merged


def explain(name: str, error: Exception, remedy: str) -> Finding:
    """A red finding from an error. A module's error has its remedy after the reason."""
    text = first_line(error)
    if isinstance(error, DataError | CheckpointError) and "; " in text:
        text, remedy = text.split("; ", 1)
    if "Too many open files" in str(error):
        remedy = "raise the limit on open files, see above"
    return Finding(name, text, remedy)


def gather(fabric: Fabric, value: object) -> list:
    """A value of each rank, on each rank."""
    if fabric.world_size == 1:
        return [value]
    values = [None] * fabric.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def merge(of_ranks: list[list[Finding]]) -> list[Finding]:
    """For each check the first rank's finding; if some are red, those, with their ranks.

    Ranks with the same remedy share a finding, which has the first one's text.
    """
    names = [finding.name for found in of_ranks for finding in found]
    merged = []
    for name in dict.fromkeys(names):
        green: list[Finding] = []
        red: dict[str, list[Finding]] = {}  # by remedy
        ranks: dict[str, list[int]] = {}
        for rank, found in enumerate(of_ranks):
            for finding in found:
                if finding.name != name:
                    continue
                if not finding.is_red:
                    green.append(finding)
                    continue
                red.setdefault(finding.remedy, []).append(finding)
                ranks.setdefault(finding.remedy, []).append(rank)
        if not red:
            merged.append(green[0])
        for remedy, findings in red.items():
            merged.append(name_ranks(findings[0], ranks[remedy], len(of_ranks)))
    return merged


def name_ranks(finding: Finding, ranks: list[int], world_size: int) -> Finding:
    """The finding, with the ranks that have it if others do not."""
    if len(ranks) == world_size:
        return finding
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return Finding(finding.name, f"{who}: {finding.text}", finding.remedy)


def in_bytes(size: float) -> str:
    """A size as people read it."""
    if size < 1e8:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e9:,.1f} GB"


def print_finding(finding: Finding) -> None:
    """One line, and a second one with the remedy if it is red."""
    colour = "RED  " if finding.is_red else "green"
    print(f"{colour}  {finding.name:12} {finding.text}", flush=True)
    if finding.is_red:
        print(f"{'':20} -> {finding.remedy}", flush=True)
