"""How densely is a script written? Tokens in a statement, which no formatter can change, and tokens in a file.

Names, numbers, strings and operators count. Comments, docstrings and blank lines do not. A compound statement
counts once, with its header. For comparison, nanoGPT's train.py has 8 tokens in a statement and 1,700 in all.
A mark says where to look and is no verdict: most often one statement there does the work of three.
"""

import ast
import io
import os
import tokenize
from dataclasses import dataclass
from pathlib import Path

MAX_TOKENS_PER_STATEMENT = 11.5
MAX_TOKENS = 2_300
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """The lines that hold code: blank lines, comments and docstrings are free, so that explaining costs nothing."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            found -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(found)


@dataclass
class Density:
    """What one file holds, and its longest function with that function's number of lines."""

    lines: int
    statements: int
    tokens: int
    longest: str

    @property
    def tokens_per_statement(self) -> float:
        """The average; 0 for a file without code."""
        return self.tokens / max(self.statements, 1)

    @property
    def mark(self) -> str:
        """An exclamation mark if the file or its average statement is over the limit."""
        over = self.tokens_per_statement > MAX_TOKENS_PER_STATEMENT or self.tokens > MAX_TOKENS
        return "!" if over else ""


def _is_docstring(node: ast.stmt) -> bool:
    """A string that stands alone; where it stands does not matter."""
    literal = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return literal and isinstance(node.value.value, str)


def _lines(node: ast.stmt) -> range:
    """The line numbers of a statement, from 1."""
    return range(node.lineno, node.end_lineno + 1)


def measure(path: Path) -> Density:
    """Count the lines, statements and tokens of a Python file, and find its longest function."""
    source = path.read_text()
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    docstrings = [node for node in statements if _is_docstring(node)]
    functions = [node for node in statements if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    free = {number for node in docstrings for number in _lines(node)}
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in free:
            tokens += 1

    longest = ""
    if functions:
        function = max(functions, key=lambda node: len(_lines(node)))
        longest = f"{function.name} {len(_lines(function))}"
    return Density(len(source.splitlines()), len(statements) - len(docstrings), tokens, longest)


def report(paths: list[Path]) -> str:
    """A line for each file, below a header."""
    lines = [f"{'':2}{'lines':>6}{'statements':>12}{'tokens':>8}{'each':>7}  longest function"]
    for path in paths:
        found = measure(path)
        counts = f"{found.lines:>6}{found.statements:>12}{found.tokens:>8,}{found.tokens_per_statement:>7.1f}"
        lines.append(f"{found.mark:2}{counts}  {found.longest}  {os.path.relpath(path)}")
    return "\n".join(lines)
