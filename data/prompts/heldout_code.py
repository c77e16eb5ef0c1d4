"""Held-out prompts of the domain code: own wordings, tasks, snippets and tables."""

from .families import Families, blocks, lines, once, records

TASKS = records("""
knights_moves|finds every square a chess knight can reach from a position
luhn|verifies a credit card number by the Luhn formula
run_lengths|counts how long each streak of equal values lasts
bracket_depth|measures the deepest nesting of parentheses
nth_root|approximates the n-th root of a positive number by bisection
spiral|reads a rectangular table in spiral order
morse|spells a message in Morse code
overlap|decides whether two time intervals overlap
leaders|picks the elements that exceed everything to their right
tic_tac_toe_winner|finds out who won a finished game of noughts and crosses
split_camel|separates a camelCase identifier into lower-case parts
perfect|recognises perfect numbers
haversine|estimates the distance between two points on the globe
mode|returns every value that appears with the highest frequency
binary_gap|finds the longest gap of zeros between two ones in binary notation
""")

PROGRAMS = blocks("""
queue = [("a", 3), ("b", 1), ("c", 2)]
while queue:
    name, left = queue.pop(0)
    print(name, end=" ")
    if left > 1:
        queue.append((name, left - 1))
---
from itertools import groupby
print([(k, len(list(g))) for k, g in groupby("xxyzzz")])
---
def f(*args, **kwargs):
    return len(args) * 10 + len(kwargs)

print(f(1, 2, a=3), f(), f(*[4, 5, 6]))
---
d = {i: chr(97 + i) for i in range(4)}
d.pop(2)
print(list(d.values()), 2 in d)
---
s = "a-b-c-d"
head, *middle, tail = s.split("-")
print(head, middle, tail)
---
class Shape:
    sides = 0
class Square(Shape):
    sides = 4
print(Shape.sides, Square().sides, isinstance(Square(), Shape))
---
import re
print(re.findall(r"[A-Z]\\w+", "Then Nina met old Tom in Rome"))
---
water, day = 100, 0
while water > 20:
    water -= 30
    water += 5
    day += 1
print(day, water)
---
rows = ["#..", ".#.", "..#"]
print(sum(row.count("#") for row in rows), "".join(r[i] for i, r in enumerate(rows)))
---
x = [i for i in range(20) if i % 3 == 0 and i % 2]
print(x, all(v < 16 for v in x))
""")

BROKEN = [
    tuple(block.split("\n", 1))
    for block in blocks("""
Expected: the shortest name. Actual: the alphabetically first name.
shortest = min(["Ottilie", "Bo", "Ana"])
---
Expected: 3 seconds of waiting. Actual: an error about a missing name.
def pause():
    sleep(3)
pause()
---
Expected: 55. Actual: 45.
s = 0
for i in range(10):
    s += i
print(s)
---
Expected: each guest greeted once. Actual: only letters are printed.
for guest in "Mona":
    print("Welcome", guest)
---
Expected: a copy with a new last entry. Actual: the original list changes too.
backup = original
backup[-1] = 0
---
Expected: free entry below 6 and above 65. Actual: nobody enters for free.
def free_entry(years):
    return years < 6 and years > 65
---
Expected: rows of the year 2023 only. Actual: all rows.
SELECT * FROM sale WHERE year = 2023 OR 1;
---
Expected: the paragraph turns green on a click. Actual: nothing happens.
document.querySelector("p").onclick = paint();
function paint() { this.style.color = "green"; }
---
Expected: the function stops at the first negative value. Actual: it checks only one value.
def first_negative(xs):
    for x in xs:
        if x < 0:
            return x
        else:
            return None
""")
]

TABLES = records("""
loans (member, book, due_date, returned)|which members have an overdue book
trips (driver, kilometres, started_at, fare)|the total fare of every driver in May
matches (home, away, home_goals, away_goals)|how often each home side won
measurements (station, taken_at, rainfall)|the wettest day at each station
votes (district, candidate, ballots)|the candidate with the most ballots in each district
tasks (title, owner, opened, closed)|the tasks that stayed open for more than a week
meals (guest, dish, calories, eaten_at)|the average calories per guest and day
payments (account, cents, paid_at)|the accounts without a payment this year
""")

TERMINAL = lines("""
Turn all PNG pictures in this directory into a single PDF from the terminal.
Which one-liner tells me how many distinct IP addresses occur in access.log?
My disk is full. Walk me through finding the culprit on Linux.
Write a Bash script that pings three hosts and prints only the ones that are down.
Set up an alias that shows the last five modified files.
How can a Bash function return text to its caller?
Explain the pipeline: ps aux | sort -nrk 4 | head -n 5
What happens when I type: chmod 750 deploy.sh
""")

IDEAS = lines(
    """
event sourcing|tail recursion|a bloom filter|the observer pattern|optimistic locking|a webhook|semantic versioning|a heap
type inference|load balancing|a trie|feature flags|duck typing|pagination
""".replace("|", "\n")
)

TOOLS = lines(
    """
a barcode scanner's list into a stock report|song lyrics into word statistics|a chess opening file into a readable move list
a folder of receipts into a monthly summary|a chat export into a list of shared links|running times into a personal best table
subtitles into plain text|a guest list into printable name cards|sensor logs into an alarm when values jump
""".replace("|", "\n")
)

PAGES = lines(
    """
a recipe card that can be printed|a seating chart for a small theatre|a countdown to New Year|a star rating made of five radio buttons
a flip card for vocabulary|a timeline of five events|a colour picker that shows the chosen hex value|a quiz page with instant feedback
""".replace("|", "\n")
)


def families() -> Families:
    """All held-out code families by name."""
    fence = "\n\n```\n{0}\n```"
    return {
        "code_heldout_task": once("h task", ("Solve this in Python 3: the routine `{0}` {1}.", "Please code `{0}` for me in idiomatic Python. Purpose: it {1}."), TASKS),
        "code_heldout_complexity": once("h complexity", ("Suppose `{0}` {1}. What running time would a good version have?",), TASKS, 8),
        "code_heldout_predict": once("h predict", ("Without running it, predict the result and justify it." + fence, "A student wrote these lines. Tell them what appears on the screen." + fence), PROGRAMS),
        "code_heldout_debug": once("h debug", ("{0} Find out why and repair it:\n\n```\n{1}\n```",), BROKEN),
        "code_heldout_query": once("h query", ("Our SQL database stores {0}. Which statement reveals {1}?", "Table: {0}. Question: {1}. Answer with one SQL statement and a remark on how it works."), TABLES),
        "code_heldout_terminal": TERMINAL,
        "code_heldout_idea": once("h idea", ("What problem does {0} solve in software, and at what price?", "Teach me {0} with an analogy and six lines of code."), IDEAS),
        "code_heldout_tool": once("h tool", ("Sketch a Python program that turns {0}. Name its functions and write the main one.",), TOOLS),
        "code_heldout_page": once("h page", ("Build {0} as a single self-contained web page.",), PAGES),
    }  # fmt: skip
