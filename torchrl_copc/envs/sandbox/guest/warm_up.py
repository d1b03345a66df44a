"""Calls that make sympy load what it loads late: the first ``solve`` takes 100 ms, the next one a few."""

from __future__ import annotations

from typing import Any


def warm_up_sympy(sympy: Any) -> None:
    """Solve, simplify, integrate and so on once. No state that code can see changes, except what is imported."""
    x, y = sympy.symbols("x y")
    n = sympy.symbols("n", integer=True, positive=True)
    sympy.solve(x**3 - x - 2, x)
    sympy.solve([x + y - 3, x * y - 2], [x, y])
    sympy.solveset(sympy.sin(x) - 1, x, sympy.S.Reals)
    sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2 + (x**2 - 1) / (x - 1) + sympy.sqrt(8))
    sympy.integrate(x * sympy.exp(x) + sympy.sin(x) ** 2, x)
    sympy.limit(sympy.sin(x) / x, x, 0)
    sympy.series(sympy.exp(x), x, 0, 4)
    sympy.summation(n**2, (n, 1, y))
    sympy.factor(sympy.expand((x + y) ** 3))
    sympy.Matrix([[2, 1], [1, 3]]).eigenvals()
    sympy.factorint(360360)
    sympy.latex(sympy.sympify("x**2/3 + sqrt(2)").diff(x))
    sympy.N(sympy.pi, 30)
