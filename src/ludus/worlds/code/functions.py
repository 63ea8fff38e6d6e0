"""Small functions with arguments to test them on. A task shows signature and docstring, the body solves it.

They are our own, and none is of a public test set. The first arguments are those of the docstring's example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TESTED: dict[Callable[..., Any], list[tuple[Any, ...]]] = {}
"""The functions, each with the arguments of its hidden tests."""


def _on(*cases: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        TESTED[function] = list(cases)
        return function

    return keep


@_on(("aaabcc",), ("",), ("x",), ("abab",), ("zzzzzzzzzzzz",), ("aabbaa",))
def run_lengths(text: str) -> list[tuple[str, int]]:
    """The runs of equal characters of a text, each as the character and its length."""
    runs: list[tuple[str, int]] = []
    for character in text:
        if runs and runs[-1][0] == character:
            runs[-1] = (character, runs[-1][1] + 1)
        else:
            runs.append((character, 1))
    return runs


@_on(
    ([[5, 7], [1, 3], [2, 4]],),
    ([],),
    ([[1, 2]],),
    ([[1, 9], [2, 3]],),
    ([[1, 2], [2, 3]],),
    ([[8, 9], [1, 1]],),
)
def merged_intervals(intervals: list[list[int]]) -> list[list[int]]:
    """The intervals in order, those that overlap or touch joined into one."""
    merged: list[list[int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


@_on(([[1, 2, 3], [4, 5, 6]],), ([],), ([[7]],), ([[1], [2], [3]],), ([[1, 2], [3, 4], [5, 6]],))
def rotated_grid(grid: list[list[int]]) -> list[list[int]]:
    """The grid turned by a quarter to the right."""
    return [list(row) for row in zip(*grid[::-1], strict=True)]


@_on(
    ([[1, 2, 3], [4, 5, 6], [7, 8, 9]],),
    ([],),
    ([[1]],),
    ([[1, 2, 3]],),
    ([[1], [2]],),
    ([[1, 2], [3, 4], [5, 6]],),
)
def spiral(grid: list[list[int]]) -> list[int]:
    """The numbers of a grid in a spiral: along the first row, down, back, up and so on."""
    rows = [list(row) for row in grid]
    found: list[int] = []
    while rows:
        found += rows.pop(0)
        rows = [list(row) for row in zip(*rows, strict=True)][::-1]
    return found


@_on((["flow", "flower", "flock"],), ([],), (["a"],), (["ab", "cd"],), (["", "x"],), (["same", "same"],))
def common_start(words: list[str]) -> str:
    """The longest text that all words begin with; empty if there are no words."""
    if not words:
        return ""
    first, last = min(words), max(words)
    length = 0
    while length < len(first) and first[length] == last[length]:
        length += 1
    return first[:length]


@_on(("kitten", "sitting"), ("", "abc"), ("same", "same"), ("ab", "ba"), ("flaw", "lawn"), ("a", ""))
def edit_distance(one: str, other: str) -> int:
    """How many insertions, deletions and replacements of a character turn one text into the other at least."""
    previous = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        current = [i]
        for j, b in enumerate(other, start=1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (a != b)))
        previous = current
    return previous[-1]


@_on(([10, 9, 2, 5, 3, 7],), ([],), ([1],), ([5, 4, 3],), ([1, 1, 1],), ([3, 1, 4, 1, 5, 9, 2, 6],))
def longest_rise(numbers: list[int]) -> int:
    """The length of the longest strictly increasing subsequence (not necessarily of neighbours)."""
    best: list[int] = []
    for i, number in enumerate(numbers):
        before = [best[j] for j in range(i) if numbers[j] < number]
        best.append(1 + max(before, default=0))
    return max(best, default=0)


@_on((["#.#", "#..", "..#"],), ([],), (["..."],), (["###"],), (["#.#.#"],), (["##.", ".#.", "..#"],))
def islands(rows: list[str]) -> int:
    """How many groups of # there are in a map; cells are joined by their sides."""
    land = {(y, x) for y, row in enumerate(rows) for x, cell in enumerate(row) if cell == "#"}
    count = 0
    while land:
        count += 1
        pending = [land.pop()]
        while pending:
            y, x = pending.pop()
            for near in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if near in land:
                    land.remove(near)
                    pending.append(near)
    return count


@_on(([1, 2, 5], 5), ([2], 3), ([7], 0), ([1], 4), ([2, 3, 7], 12), ([5, 10], 20))
def ways_to_pay(coins: list[int], amount: int) -> int:
    """In how many ways an amount can be paid with coins, of which there are any number of each kind."""
    ways = [1] + [0] * amount
    for coin in coins:
        for total in range(coin, amount + 1):
            ways[total] += ways[total - coin]
    return ways[amount]


@_on(
    ([[60, 2], [100, 3], [120, 4]], 6),
    ([], 5),
    ([[10, 9]], 5),
    ([[1, 1], [2, 1], [3, 1]], 2),
    ([[5, 0]], 0),
)
def best_load(items: list[list[int]], limit: int) -> int:
    """The highest value that fits: items are [value, weight], and the weights may be `limit` in all."""
    best = [0] * (limit + 1)
    for value, weight in items:
        for room in range(limit, weight - 1, -1):
            best[room] = max(best[room], best[room - weight] + value)
    return best[limit]


@_on(([1, [2, [3, []], 4]],), ([],), ([[[]]],), ([1, 2],), ([[1], [[2]], [[[3]]]],))
def flat(nested: list[object]) -> list[object]:
    """The items of lists in lists, in order, without the lists."""
    found: list[object] = []
    for item in nested:
        if isinstance(item, list):
            found += flat(item)
        else:
            found.append(item)
    return found


@_on(([1, 2, 3, 4, 5], 2), ([], 3), ([1], 1), ([1, 2, 3], 5), ([1, 2, 3, 4], 4))
def chunks(items: list[int], size: int) -> list[list[int]]:
    """The items in lists of `size`; the last one may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


@_on(([1, 2, 3, 4], 1), ([], 3), ([1, 2, 3], 0), ([1, 2, 3], 7), ([1, 2, 3, 4], -1))
def turned(items: list[int], steps: int) -> list[int]:
    """The items moved to the right by so many places, in a circle; to the left for a negative number."""
    if not items:
        return []
    steps %= len(items)
    return items[-steps:] + items[:-steps] if steps else list(items)


@_on(([1, 2, 3, 4], 2), ([5], 1), ([1, 2], 3), ([2, 4, 6, 8], 4), ([1, 1, 1], 2))
def moving_averages(numbers: list[float], width: int) -> list[float]:
    """The averages of each `width` neighbours, from left to right."""
    return [sum(numbers[i : i + width]) / width for i in range(len(numbers) - width + 1)]


@_on(([1, 2, 3, 5, 7, 8],), ([],), ([4],), ([1, 3, 5],), ([-2, -1, 0, 9],))
def ranges_of(numbers: list[int]) -> str:
    """Ascending numbers as text, neighbours joined: "1-3,5,7-8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@_on(("1h20m",), ("45m",), ("2h",), ("0m",), ("10h5m",), ("1h1m",))
def minutes_of(duration: str) -> int:
    """The minutes of a duration such as "1h20m", "2h" or "45m"."""
    hours, separator, rest = duration.partition("h")
    if not separator:
        hours, rest = "0", duration
    minutes = rest.removesuffix("m")
    return 60 * int(hours) + int(minutes or 0)


@_on(("23:50", 20), ("00:00", 0), ("12:30", 45), ("00:10", -20), ("08:15", 1440), ("23:59", 1))
def clock_after(time: str, minutes: int) -> str:
    """The time of day, as "HH:MM", so many minutes later (or earlier, for a negative number)."""
    hour, minute = time.split(":")
    total = (60 * int(hour) + int(minute) + minutes) % (24 * 60)
    return f"{total // 60:02}:{total % 60:02}"


@_on(
    ("192.168.0.1",),
    ("256.1.1.1",),
    ("1.2.3",),
    ("01.2.3.4",),
    ("0.0.0.0",),
    ("a.b.c.d",),
    ("1.2.3.4.5",),
)
def is_address(text: str) -> bool:
    """Whether a text is an IPv4 address: four numbers from 0 to 255 without leading zeros, between dots."""
    parts = text.split(".")
    return len(parts) == 4 and all(p.isdigit() and str(int(p)) == p and int(p) < 256 for p in parts)


@_on((9875,), (0,), (9,), (10,), (123456789,), (999999,))
def digital_root(number: int) -> int:
    """The sum of the digits, of the sum's digits and so on, until one digit is left."""
    while number > 9:
        number = sum(int(digit) for digit in str(number))
    return number


@_on((2024, 2), (2023, 2), (1900, 2), (2000, 2), (2021, 4), (2021, 12))
def days_in_month(year: int, month: int) -> int:
    """How many days a month of the Gregorian calendar has."""
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month in (4, 6, 9, 11) else 31


@_on(
    ([[1, 2], [3, 4]], [[0, 1], [1, 0]]),
    ([[2]], [[3]]),
    ([[1, 2, 3]], [[1], [2], [3]]),
    ([[1], [2]], [[3, 4]]),
)
def matrix_product(one: list[list[int]], other: list[list[int]]) -> list[list[int]]:
    """The product of two matrices that are lists of rows."""
    return [
        [sum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*other, strict=True)]
        for row in one
    ]


@_on(([3, 3, 4, 3],), ([],), ([1, 2],), ([7],), ([1, 2, 2, 1, 2],), ([1, 1, 2, 2],))
def majority(items: list[int]) -> int | None:
    """The number that more than half of the items are, or None."""
    for item in set(items):
        if 2 * items.count(item) > len(items):
            return item
    return None


@_on(([4, 1, 4, 3],), ([1],), ([],), ([2, 2],), ([5, 3],), ([-1, -5, -3],))
def second_largest(numbers: list[int]) -> int | None:
    """The largest number below the largest, or None where there is none."""
    distinct = sorted(set(numbers))
    return distinct[-2] if len(distinct) > 1 else None


@_on((["eat", "tea", "tan", "ate"],), ([],), (["x"],), (["ab", "ba", "abc", "cab"],), (["a", "a"],))
def anagram_groups(words: list[str]) -> list[list[str]]:
    """The words in groups of anagrams, in the order of the list; groups in the order of their first words."""
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault("".join(sorted(word)), []).append(word)
    return list(groups.values())


@_on(("the cat the dog a cat the end", 2), ("", 3), ("b a", 1), ("x x y y z", 2), ("one", 5))
def frequent_words(text: str, count: int) -> list[str]:
    """The most frequent words of a text, the most frequent first, equals in alphabetical order."""
    words = text.split()
    return sorted(set(words), key=lambda word: (-words.count(word), word))[:count]


@_on(
    (8, [0, 0], [1, 2]),
    (8, [0, 0], [0, 0]),
    (8, [0, 0], [7, 7]),
    (3, [0, 0], [1, 1]),
    (5, [0, 0], [4, 4]),
)
def knight_moves(size: int, start: list[int], goal: list[int]) -> int:
    """The fewest moves of a knight from one square of a board to another; -1 if there is no way."""
    ahead, moves = [(start[0], start[1])], 0
    reached = set(ahead)
    while ahead:
        if (goal[0], goal[1]) in ahead:
            return moves
        found = []
        for x, y in ahead:
            for dx, dy in ((1, 2), (2, 1), (-1, 2), (-2, 1), (1, -2), (2, -1), (-1, -2), (-2, -1)):
                square = (x + dx, y + dy)
                if 0 <= square[0] < size and 0 <= square[1] < size and square not in reached:
                    reached.add(square)
                    found.append(square)
        ahead, moves = found, moves + 1
    return -1


@_on(([[0, 1], [1, 2]], 3), ([], 2), ([[0, 1], [1, 0]], 2), ([[2, 0], [2, 1], [0, 1]], 3), ([[0, 0]], 1))
def has_cycle(edges: list[list[int]], count: int) -> bool:
    """Whether a directed graph with the nodes below `count` has a cycle."""
    left, edges = set(range(count)), [list(edge) for edge in edges]
    while True:
        free = [node for node in left if not any(b == node and a in left for a, b in edges)]
        if not free:
            return bool(left)
        left -= set(free)


@_on(("3 4 + 2 *",), ("5",), ("8 2 /",), ("1 2 3 * +",), ("10 3 -",), ("2 3 4 * * 5 -",))
def postfix_value(expression: str) -> float:
    """The value of an expression in reverse Polish notation, with + - * and /."""
    stack: list[float] = []
    for word in expression.split():
        if word in "+-*/":
            b, a = stack.pop(), stack.pop()
            stack.append({"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0.0}[word])
        else:
            stack.append(float(word))
    return stack[0]


@_on(([3, 1, 2], [9, 8]), ([], []), ([1], []), ([1, 2, 3], [4]), ([], [5, 6]))
def alternating(one: list[int], other: list[int]) -> list[int]:
    """The items of two lists in turn, beginning with the first list; what is left of one follows at the end."""
    short = min(len(one), len(other))
    mixed = [item for pair in zip(one, other, strict=False) for item in pair]
    return mixed + one[short:] + other[short:]


@_on(([5, 1, 4],), ([],), ([1, 2, 3],), ([3, 2, 1],), ([2, 2, 1],))
def inversions(numbers: list[int]) -> int:
    """How many pairs of numbers stand in the wrong order, the larger one first."""
    return sum(a > b for i, a in enumerate(numbers) for b in numbers[i + 1 :])


@_on((12,), (1,), (13,), (360,), (97,), (1024,))
def factorised(number: int) -> str:
    """The prime factors with their powers as text: "2^2*3"; "1" for 1."""
    parts, divisor = [], 2
    while number > 1:
        power = 0
        while number % divisor == 0:
            number, power = number // divisor, power + 1
        if power:
            parts.append(str(divisor) if power == 1 else f"{divisor}^{power}")
        divisor += 1
    return "*".join(parts) or "1"


@_on(("A man walks", 5), ("", 4), ("one two three four", 9), ("aa bb cc", 2), ("a b c d", 3))
def wrapped(text: str, width: int) -> list[str]:
    """The words in lines of at most `width` characters, each line as full as can be; no word is longer."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


@_on(([7, 1, 5, 3, 6],), ([],), ([5, 4, 3],), ([1, 2],), ([2, 9, 1, 5],))
def best_trade(prices: list[int]) -> int:
    """The highest gain of buying once and selling once later, or 0."""
    best, lowest = 0, None
    for price in prices:
        lowest = price if lowest is None else min(lowest, price)
        best = max(best, price - lowest)
    return best


@_on(([-2, 1, -3, 4, -1, 2],), ([5],), ([-3, -1, -2],), ([1, 2, 3],), ([2, -1, 2, -5, 3],))
def best_stretch(numbers: list[int]) -> int:
    """The highest sum of one or more neighbours."""
    best = ending = numbers[0]
    for number in numbers[1:]:
        ending = max(number, ending + number)
        best = max(best, ending)
    return best
