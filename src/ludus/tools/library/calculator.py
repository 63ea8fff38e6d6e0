"""`calculator`: arithmetic, exact where that is natural, and never by `eval`."""

from __future__ import annotations

from ludus.core.failures import ToolFault
from ludus.tools.library.expressions import evaluate
from ludus.tools.library.numbers import CalculationError, shown
from ludus.tools.tool import tool


@tool
async def calculator(expression: str) -> str:
    """Compute an arithmetic expression, such as (1 + 2/3) * sqrt(2) or comb(52, 5) > 10**6.

    Operators: + - * / // % ** and comparisons. Functions: sqrt, cbrt, exp, ln, log(x, base), log2, log10, sin,
    cos, tan and their inverses, abs, round(x, digits), floor, ceil, min, max, sum, gcd, lcm, factorial, comb,
    perm, hypot, mod. Constants: pi, e, tau. Whole numbers and fractions are exact.

    Args:
        expression: The expression to compute.
    """
    try:
        return shown(evaluate(expression))
    except CalculationError as error:
        raise ToolFault(f"Cannot compute that: {error}.") from None
