"""What a day on a GPU found, as tables in Markdown: one for each part."""

from typing import Any

NUMBERS = (int, float)


def show(rows: list[dict[str, Any]]) -> str:
    """A table for each part, in the order in which they were measured."""
    parts = dict.fromkeys(row["part"] for row in rows)
    tables = []
    for part in parts:
        of_part = [row for row in rows if row["part"] == part]
        tables.append(f"### {part}\n\n{make_table(of_part)}")
    return "\n\n".join(tables)


def make_table(rows: list[dict[str, Any]]) -> str:
    """A column for each value that any row has; a cell is empty where a row has none."""
    names = []
    for row in rows:
        names += [name for name in row if name != "part" and name not in names]
    lines = [names, ["---"] * len(names)]
    for row in rows:
        lines.append([format_value(row.get(name)) for name in names])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_value(value: Any) -> str:
    """A number with three digits, a measurement with its range, anything else as it is."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict) and set(value) == {"median", "min", "max"}:
        low = format_value(value["min"])
        high = format_value(value["max"])
        return f"{format_value(value['median'])} ({low}–{high})"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(format_value, value))
    if isinstance(value, NUMBERS):
        return format_number(value)
    return str(value).replace("|", "/")


def format_number(value: float) -> str:
    """With three digits."""
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
