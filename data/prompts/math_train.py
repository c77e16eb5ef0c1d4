"""Training prompts of the domain math: arithmetic word problems of one to three steps.

Each function is one story form. Numbers are drawn so that the answers are whole or have at most two decimals.
"""

import random

from .families import Families, article, generated

PEOPLE = (
    "Amara Bruno Celine Dario Elif Farid Greta Hugo Ines Jonas Kavya Leo Mira Nadia Omar Petra Quentin Rosa Samir "
    "Tara Ulrich Vera Wei Yara Zoe Anton Bella Chidi Dalia Emil"
).split()
PLACES = "the bakery|the market|the corner shop|the school fair|the garden centre|the flea market|the farm stand".split("|")
GOODS = (
    "apples oranges candles notebooks pencils muffins stickers marbles postcards buttons lemons peaches seedlings "
    "ribbons cookies shells beads tickets tomatoes eggs"
).split()
ASKS = (
    "Show your steps.",
    "Explain your reasoning.",
    "Give the calculation and the final answer.",
    "Work it out step by step.",
    "Write down every step.",
    "How do you get there?",
    "One short sentence is enough.",
    "Please include the calculation.",
    "Keep the explanation brief.",
    "State the result in a full sentence.",
    "",
    "",
    "",
)


def two(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(PEOPLE, 2)
    return first, second


def ask(rng: random.Random) -> str:
    """A closing request, or nothing."""
    closing = rng.choice(ASKS)
    return f" {closing}" if closing else ""


def boxes(r: random.Random) -> str:
    p, g = r.choice(PEOPLE), r.choice(GOODS)
    n, k, extra = r.randint(3, 14), r.randint(4, 24), r.randint(2, 30)
    return f"{p} packs {g} into {n} boxes with {k} {g} in each box and has {extra} {g} left over. How many {g} did {p} start with?{ask(r)}"


def change(r: random.Random) -> str:
    p, place, g = r.choice(PEOPLE), r.choice(PLACES), r.choice(GOODS)
    n, price = r.randint(2, 9), r.randint(2, 6)
    paid = (n * price // 20 + 1) * 20
    return f"At {place}, {g} cost {price} dollars each. {p} buys {n} of them and pays with {paid} dollars. How much change does {p} get?{ask(r)}"


def travel(r: random.Random) -> str:
    what, speed = r.choice([("train", 80), ("bus", 60), ("car", 90), ("cyclist", 15), ("ferry", 30), ("truck", 70)])
    speed += r.choice([-10, -5, 0, 5])
    first, second, rest = r.randint(2, 5), r.randint(2, 4), r.choice([15, 20, 30, 45])
    return (
        f"A {what} moves at {speed} kilometres per hour for {first} hours, stops for {rest} minutes, and then goes on at the "
        f"same speed for {second} more hours. How far has it gone in total?{ask(r)}"
    )


def savings(r: random.Random) -> str:
    p, weekly, goal_weeks, start = r.choice(PEOPLE), r.randint(5, 25), r.randint(4, 16), r.randint(10, 60)
    thing = r.choice("bicycle|guitar|camera|tent|pair of skates|keyboard|telescope|drum kit".split("|"))
    goal = start + weekly * goal_weeks
    return (
        f"{p} wants to buy a {thing} that costs {goal} dollars. {p} already has {start} dollars and saves {weekly} dollars "
        f"every week. In how many weeks will there be enough money?{ask(r)}"
    )


def discount(r: random.Random) -> str:
    thing = r.choice("jacket lamp backpack kettle chair watch blanket printer scarf radio".split())
    price, percent = r.randint(2, 20) * 20, r.choice([5, 10, 15, 20, 25, 30, 40])
    return f"A {thing} normally costs {price} dollars, and this week it is sold at {percent} percent off. What is the sale price?{ask(r)}"


def average(r: random.Random) -> str:
    p, count = r.choice(PEOPLE), r.choice([3, 4, 5])
    thing = r.choice("points in a quiz|pages of a novel|laps in the pool|kilometres on the bike|pushups|sales calls".split("|"))
    values = [r.randint(5, 40) for _ in range(count - 1)]
    values.append(count - sum(values) % count + r.randint(1, 6) * count)
    days = " and ".join([", ".join(map(str, values[:-1])), str(values[-1])])
    return f"Over {count} days {p} recorded these numbers of {thing}: {days}. What is the average per day?{ask(r)}"


def rectangle(r: random.Random) -> str:
    what = r.choice("garden|classroom floor|parking lot|vegetable bed|courtyard|playground|stage".split("|"))
    length, width, cost = r.randint(6, 30), r.randint(3, 20), r.randint(2, 12)
    return (
        f"A rectangular {what} is {length} metres long and {width} metres wide. A fence around it costs {cost} dollars per "
        f"metre. What does the whole fence cost?{ask(r)}"
    )


def tiles(r: random.Random) -> str:
    length, width, side = r.randint(2, 9), r.randint(2, 7), r.choice([25, 50, 20])
    room = r.choice("kitchen|bathroom|hallway|balcony|pantry|laundry room".split("|"))
    return (
        f"How many square tiles with a side of {side} centimetres are needed to cover a {room} that measures {length} metres "
        f"by {width} metres?{ask(r)}"
    )


def recipe(r: random.Random) -> str:
    dish = r.choice("pancakes|lentil soup|banana bread|dumplings|pumpkin stew|oat bars|rice pudding".split("|"))
    unit, amount, base, factor = (
        r.choice("grams of flour|millilitres of milk|grams of sugar".split("|")),
        r.randint(4, 30) * 10,
        r.choice([2, 4, 5]),
        r.randint(2, 6),
    )
    return f"A recipe for {dish} serves {base} people and needs {amount} {unit}. How many {unit} are needed for {base * factor} people?{ask(r)}"


def ratio(r: random.Random) -> str:
    a, b, k = r.randint(2, 5), r.randint(1, 7), r.randint(3, 15)
    if a == b:
        b += 1
    first, second, whole = r.choice(
        [
            ("blue", "yellow", "litres of green paint"),
            ("sand", "cement", "buckets of mortar"),
            ("juice", "water", "cups of punch"),
            ("oil", "vinegar", "spoons of dressing"),
            ("rye flour", "wheat flour", "kilograms of bread flour"),
        ]
    )
    return f"{first.capitalize()} and {second} are mixed in the ratio {a} to {b}. How much {first} is there in {(a + b) * k} {whole}?{ask(r)}"


def ages(r: random.Random) -> str:
    a, b = two(r)
    young, times, years = r.randint(3, 12), r.randint(3, 5), r.randint(3, 15)
    return f"{a} is {young} years old and {b} is {times} times as old. How old will {b} be in {years} years?{ask(r)}"


def workers(r: random.Random) -> str:
    n, hours, m = r.choice(
        [
            (2, 12, 3),
            (3, 8, 4),
            (4, 6, 8),
            (6, 10, 5),
            (5, 12, 10),
            (4, 15, 6),
            (8, 9, 6),
            (3, 20, 5),
            (6, 14, 7),
            (10, 6, 4),
            (2, 18, 9),
            (9, 8, 12),
        ]
    )
    job = r.choice("paint a fence|harvest a field|pack an order|clean a warehouse|lay a path|sort the mail".split("|"))
    return f"It takes {n} workers {hours} hours to {job}. Working at the same rate, how long would {m} workers need?{ask(r)}"


def tank(r: random.Random) -> str:
    rate, leak, minutes = r.randint(8, 25), r.randint(2, 6), r.randint(5, 30)
    vessel = r.choice("water tank|bathtub|fish pond|barrel|paddling pool|reservoir".split("|"))
    return (
        f"A pump fills an empty {vessel} with {rate} litres per minute while a crack loses {leak} litres per minute. How "
        f"many litres are in it after {minutes} minutes?{ask(r)}"
    )


def fraction_left(r: random.Random) -> str:
    p, g, d = r.choice(PEOPLE), r.choice(GOODS), r.choice([3, 4, 5, 6, 8])
    total, num, more = d * r.randint(6, 20), 1, r.randint(2, 9)
    num = r.randint(1, d - 2)
    return f"{p} had {total} {g}. First {num}/{d} of them were sold, and later {more} more were given away. How many {g} remain?{ask(r)}"


def seats(r: random.Random) -> str:
    rows, per, empty = r.randint(8, 30), r.randint(10, 28), r.randint(5, 70)
    hall = r.choice("theatre|cinema|concert hall|lecture hall|circus tent|stadium block".split("|"))
    return f"A {hall} has {rows} rows of {per} seats. Tonight {empty} seats stay empty. How many people are in the audience?{ask(r)}"


def pages(r: random.Random) -> str:
    p, per, days, left = r.choice(PEOPLE), r.randint(8, 35), r.randint(4, 12), r.randint(20, 120)
    return f"{p} reads {per} pages of a book every evening. After {days} evenings there are still {left} pages to go. How long is the book?{ask(r)}"


def wages(r: random.Random) -> str:
    p, wage, normal, over = r.choice(PEOPLE), r.randint(6, 15) * 2, r.randint(20, 40), r.randint(2, 10)
    return (
        f"{p} earns {wage} dollars an hour and one and a half times as much for overtime. Last week {p} worked {normal} normal "
        f"hours and {over} overtime hours. How much was earned?{ask(r)}"
    )


def clock(r: random.Random) -> str:
    what = r.choice("film|lesson|hike|board meeting|football match|choir rehearsal|flight|workshop".split("|"))
    hour, minute, length = r.randint(8, 18), r.choice([0, 10, 15, 25, 40]), r.choice([50, 75, 95, 110, 135, 150])
    return f"A {what} starts at {hour}:{minute:02d} and lasts {length} minutes. At what time does it end?{ask(r)}"


def convert(r: random.Random) -> str:
    big, small, factor = r.choice(
        [
            ("kilometres", "metres", 1000),
            ("hours", "minutes", 60),
            ("kilograms", "grams", 1000),
            ("metres", "centimetres", 100),
            ("litres", "millilitres", 1000),
            ("weeks", "days", 7),
        ]
    )
    n, extra = r.randint(2, 15), r.randint(2, factor - 1)
    return r.choice(
        [f"Convert {n} {big} and {extra} {small} to {small}.", f"How many {small} are {n} {big} plus {extra} {small}?"]
    ) + ask(r)


def equation(r: random.Random) -> str:
    a, x, b = r.randint(2, 12), r.randint(2, 15), r.randint(1, 40)
    op, c = r.choice([("+", a * x + b), ("-", a * x - b)])
    return r.choice(["Solve for x: {0}.", "Find the value of x when {0}.", "What is x if {0}? Check your answer."]).format(
        f"{a}x {op} {b} = {c}"
    )


def think_of(r: random.Random) -> str:
    p, x, m, s = r.choice(PEOPLE), r.randint(3, 25), r.randint(2, 9), r.randint(2, 30)
    return f"{p} thinks of a number, multiplies it by {m} and then adds {s}. The result is {x * m + s}. What was the number?{ask(r)}"


def percent_of(r: random.Random) -> str:
    group, verb = r.choice(
        [
            ("students in a school", "walk to class"),
            ("seeds in a tray", "sprout"),
            ("guests at a wedding", "order fish"),
            ("houses in a village", "have solar panels"),
            ("emails in an inbox", "are unread"),
            ("members of a club", "vote yes"),
        ]
    )
    total, pc = r.randint(2, 30) * 20, r.choice([5, 10, 15, 20, 30, 35, 45, 60, 75])
    return f"Of {total} {group}, {pc} percent {verb}. How many is that, and how many do not?"


def phone(r: random.Random) -> str:
    base, per, units = r.randint(8, 30), r.randint(2, 9), r.randint(11, 60)
    what = r.choice(
        [
            ("phone plan", "gigabyte"),
            ("gym pass", "class"),
            ("printing service", "poster"),
            ("bike rental", "hour"),
            ("storage unit", "box"),
        ]
    )
    return f"A {what[0]} costs {base} dollars a month plus {per} dollars for every {what[1]}. What is the bill for a month with {units} of them?{ask(r)}"


def compare_offers(r: random.Random) -> str:
    g, n, m = (
        r.choice("yoghurts|batteries|towels|light bulbs|pens|socks|sponges".split("|")),
        r.choice([3, 4, 6]),
        r.choice([8, 10, 12]),
    )
    a, b = n * r.randint(2, 5), m * r.randint(2, 4) + r.choice([-4, -2, 2, 4])
    return f"One shop sells {n} {g} for {a} dollars, another sells {m} {g} for {b} dollars. Which offer is cheaper per piece?{ask(r)}"


def sharing(r: random.Random) -> str:
    p, g, k, each, left = r.choice(PEOPLE), r.choice(GOODS), r.randint(3, 9), r.randint(4, 20), 0
    left = r.randint(1, k - 1)
    return f"{p} shares {k * each + left} {g} equally among {k} friends and keeps whatever cannot be shared. How many does each friend get, and how many does {p} keep?"


def stairs(r: random.Random) -> str:
    p, floors, steps, times = r.choice(PEOPLE), r.randint(3, 12), r.randint(12, 22), r.randint(2, 5)
    return f"{p} lives {floors} floors above the street, and each floor has {steps} steps. How many steps does {p} climb by going up {times} times a day?{ask(r)}"


def orchard(r: random.Random) -> str:
    tree, n, k = r.choice("apple pear plum cherry olive lemon".split()), r.randint(6, 25), r.randint(15, 60)
    crate = r.choice([5, 10, 15])
    return f"An orchard has {n} {tree} trees, and each tree gives {k * crate} kilograms of fruit. How many crates of {crate} kilograms can be filled?{ask(r)}"


def temperature(r: random.Random) -> str:
    start, drop, rise = r.randint(8, 24), r.randint(10, 30), r.randint(2, 12)
    town = r.choice("Harlow Bay|Norrvik|Pinecrest|Saltmarsh|Fernhill|Graystone".split("|"))
    return f"At noon it was {start} degrees in {town}. By midnight the temperature had fallen by {drop} degrees, and by morning it had risen by {rise}. What was it then?{ask(r)}"


def perimeter(r: random.Random) -> str:
    shape, sides = r.choice(
        [("square", 4), ("regular hexagon", 6), ("equilateral triangle", 3), ("regular octagon", 8), ("regular pentagon", 5)]
    )
    side = r.randint(3, 40)
    return r.choice(
        [
            f"The perimeter of {article(shape)} is {sides * side} centimetres. How long is one side?{ask(r)}",
            f"One side of {article(shape)} measures {side} centimetres. What is its perimeter?{ask(r)}",
        ]
    )


def volume(r: random.Random) -> str:
    a, b, c = r.randint(2, 12), r.randint(2, 12), r.randint(2, 10)
    what = r.choice("box|aquarium|drawer|shipping crate|planter".split("|"))
    return f"What is the volume of {article(what)} that is {a} decimetres long, {b} decimetres wide and {c} decimetres high, in litres?{ask(r)}"


def profit(r: random.Random) -> str:
    p, g, cost, gain, n, fee = (
        r.choice(PEOPLE),
        r.choice(GOODS),
        r.randint(2, 6),
        r.randint(1, 5),
        r.randint(10, 80),
        r.randint(5, 20),
    )
    return f"{p} buys {n} {g} for {cost} dollars each and sells all of them for {cost + gain} dollars each. The stall costs {fee} dollars. What is the profit?{ask(r)}"


def teams(r: random.Random) -> str:
    n, k, sport = (
        r.randint(4, 12),
        r.choice([5, 6, 7, 9, 11]),
        r.choice("volleyball handball football relay rowing hockey".split()),
    )
    return f"{n} teams of {k} players take part in a {sport} tournament, and each team brings two coaches. How many people is that in all?{ask(r)}"


def pairs_sum(r: random.Random) -> str:
    a, b = two(r)
    diff, small = r.randint(2, 20), r.randint(5, 40)
    thing = r.choice("stamps|medals|comic books|badges|coins|records".split("|"))
    return f"Together {a} and {b} own {2 * small + diff} {thing}. {a} owns {diff} more than {b}. How many does each of them own?{ask(r)}"


def fuel(r: random.Random) -> str:
    use, hundreds, price = r.randint(4, 9), r.randint(2, 9), r.choice([1.5, 2, 1.8, 1.6])
    vehicle = r.choice("car|van|motorhome|delivery truck|taxi|minibus".split("|"))
    return f"A {vehicle} uses {use} litres of fuel per 100 kilometres, and fuel costs {price} dollars a litre. What does a trip of {hundreds * 100} kilometres cost?{ask(r)}"


def steps_sum(r: random.Random) -> str:
    a, b, c, d = r.randint(12, 95), r.randint(3, 12), r.randint(2, 9), r.randint(5, 60)
    return r.choice(
        [
            f"Calculate {a} + {b} * {c} - {d} and explain the order of operations.",
            f"What is ({a} + {d}) * {c} - {b}? Show each step.",
            f"Work out {a * c} / {c} + {b} * {d}, one operation at a time.",
        ]
    )


def multiply(r: random.Random) -> str:
    a, b = r.randint(12, 98), r.randint(12, 49)
    return r.choice(
        [
            f"Multiply {a} by {b} without a calculator and show how.",
            f"How can I compute {a} times {b} in my head?",
            f"What is {a} x {b}? Split it into easier parts.",
        ]
    )


def divide(r: random.Random) -> str:
    d, q, rem = r.randint(3, 19), r.randint(12, 90), r.randint(0, 2)
    return r.choice(
        [
            f"Divide {d * q + rem} by {d} using long division.",
            f"What are the quotient and the remainder of {d * q + rem} divided by {d}?",
        ]
    )


def fractions(r: random.Random) -> str:
    a, b, c, d = r.randint(1, 5), r.randint(6, 12), r.randint(1, 4), r.randint(5, 10)
    return r.choice(
        [
            f"Add {a}/{b} and {c}/{d} and simplify the result.",
            f"Which is larger, {a}/{b} or {c}/{d}? Explain how you compared them.",
            f"What is {a}/{b} multiplied by {c}/{d}?",
        ]
    )


def growth(r: random.Random) -> str:
    thing, unit = r.choice(
        [
            ("colony of ants", "ants"),
            ("mailing list", "readers"),
            ("bacteria culture", "cells"),
            ("chess club", "members"),
            ("rabbit farm", "rabbits"),
            ("podcast", "listeners"),
        ]
    )
    start, years = r.randint(2, 30) * 10, r.randint(2, 5)
    return (
        f"A {thing} starts with {start} {unit} and doubles every month. How many {unit} are there after {years} months?{ask(r)}"
    )


def sequence(r: random.Random) -> str:
    a, d = r.randint(1, 20), r.randint(2, 12)
    terms = ", ".join(str(a + i * d) for i in range(4))
    return r.choice(
        [
            f"What are the next three numbers in the sequence {terms}?",
            f"The sequence {terms} continues in the same way. What is its {r.randint(8, 20)}th term?",
            f"Describe the rule behind the numbers {terms} and continue them.",
        ]
    )


def probability(r: random.Random) -> str:
    a, b, c = r.randint(2, 9), r.randint(2, 9), r.randint(1, 6)
    colours = r.sample("red blue green white black yellow".split(), 3)
    bag = r.choice("bag|jar|drawer|hat|box".split("|"))
    return f"A {bag} holds {a} {colours[0]}, {b} {colours[1]} and {c} {colours[2]} balls. What is the probability of drawing a {colours[0]} ball?{ask(r)}"


def interest(r: random.Random) -> str:
    p, amount, rate, years = r.choice(PEOPLE), r.randint(2, 40) * 100, r.randint(1, 6), r.randint(2, 6)
    return f"{p} puts {amount} dollars into an account with {rate} percent simple interest per year. How much is in the account after {years} years?{ask(r)}"


def tip(r: random.Random) -> str:
    n, per, pc = r.randint(2, 8), r.randint(6, 20) * 2, r.choice([5, 10, 15, 20])
    meal = r.choice("dinner|brunch|pizza night|lunch|farewell meal".split("|"))
    return f"{n} friends spend {n * per} dollars on a {meal} and leave a tip of {pc} percent. How much does each of them pay when they split it evenly?{ask(r)}"


def missing(r: random.Random) -> str:
    a, b, c = r.randint(5, 60), r.randint(5, 60), r.randint(5, 60)
    days = "Monday Tuesday Wednesday Thursday Friday".split()
    day = days[r.randint(0, 2) :][:3]
    what = r.choice("visitors came to a museum|loaves were baked|parcels were delivered|bikes were repaired".split("|"))
    return f"In three days {a + b + c} {what}: {a} on {day[0]}, {b} on {day[1]} and the rest on {day[2]}. How many was it on {day[2]}?{ask(r)}"


def families() -> Families:
    """Story forms by name; about the same number of prompts of each."""
    forms = (
        boxes, change, travel, savings, discount, average, rectangle, tiles, recipe, ratio, ages, workers, tank, fraction_left,
        seats, pages, wages, clock, convert, equation, think_of, percent_of, phone, compare_offers, sharing, stairs, orchard,
        temperature, perimeter, volume, profit, teams, pairs_sum, fuel, steps_sum, multiply, divide, fractions, growth, sequence,
        probability, interest, tip, missing,
    )  # fmt: skip
    return {f"math_{form.__name__}": generated(form.__name__, form, 19) for form in forms}
