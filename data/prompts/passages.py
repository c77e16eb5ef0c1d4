"""Passages of the rewrite training prompts, composed from scenes.

A scene is a block of lines after a heading `# kind name`. Each line is one step of the text; where it offers two
alternatives separated by ` || `, the first ones together are one passage and the second ones another. In scenes marked
`*` the alternatives also combine crosswise. Slots such as `{name}` are filled once per passage.
"""

import random
import re

from . import passages_a, passages_b, passages_c

FILLERS = {
    "name": "Maria Daniel Priya Oskar Leila Martin Sofia Ahmed Clara Viktor Joan Ravi Helena Peter Naomi Luis".split(),
    "other": "Karin Tobias Yusuf Emma Marek Diana Felix Aisha Simon Rachel Ivan Lucia Jacob Mina".split(),
    "woman": "Maria Priya Leila Sofia Clara Helena Naomi Karin Diana Rachel".split(),
    "man": "Daniel Oskar Martin Ahmed Viktor Ravi Peter Luis Marek Jacob".split(),
    "last": "Bergman Castillo Novak Okafor Lindqvist Haddad Moreau Tanaka Fischer Rossi Kaplan Murphy Silva Petrov".split(),
    "town": "Ashford|Lindenau|Port Merrin|Oakhaven|Brightwater|Kestrel Bay|Marlow|Eastbrook|Riverton|Sandholm".split("|"),
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "month": "January February March April May June July August September October November December".split(),
}
NUMBERS = {"a": range(3, 10), "b": range(18, 60), "c": range(120, 900, 5)}


def fill(text: str, rng: random.Random) -> str:
    """`text` with its slots filled; a slot that occurs twice gets the same value."""
    values: dict[str, str] = {}
    for slot in re.findall(r"\{(\w+)\}", text):
        if slot not in values:
            values[slot] = str(rng.choice(FILLERS[slot] if slot in FILLERS else list(NUMBERS[slot])))
    return text.format(**values)


def scenes() -> list[tuple[str, str, list[list[str]]]]:
    """(kind, name, alternatives by line) of every scene."""
    found = []
    for block in re.split(r"^# ", passages_a.TEXT + passages_b.TEXT + passages_c.TEXT, flags=re.MULTILINE)[1:]:
        heading, *body = block.strip().splitlines()
        kind, name = heading.split(" ", 1)
        found.append((kind, name, [line.split(" || ") for line in body if line.strip()]))
    return found


def compose(name: str, choices: tuple[int, int], steps: list[list[str]]) -> str:
    """The passage that takes alternative `choices[0]` of the even lines and `choices[1]` of the odd ones."""
    rng = random.Random(f"{name} {choices}")
    return fill(" ".join(options[min(choices[i % 2], len(options) - 1)] for i, options in enumerate(steps)), rng)


def passages() -> list[tuple[str, str]]:
    """(kind, text) of every training passage."""
    found = []
    for kind, name, steps in scenes():
        variants = [(0, 0)] + ([(1, 1)] if max(map(len, steps)) == 2 else []) + ([(0, 1), (1, 0)] if name.endswith("*") else [])
        found += [(kind, compose(name, variant, steps)) for variant in variants]
    return found
