"""Held-out prompts of the domain math. Every story form is used only here."""

import random

from .families import Families, generated, lines

NAMES = "Ruth Tomas Aiko Pavel Noor Ivy Kofi Lena Mateo Sunniva Desmond Hana".split()


def aquarium(r: random.Random) -> str:
    who, neon, per = r.choice(NAMES), r.randint(5, 20), r.randint(2, 5)
    return f"{who}'s aquarium contains {neon} neon fish and {per} times as many guppies. After {who} moves {r.randint(3, 9)} guppies to another tank, how many fish of both kinds stay?"


def elevator(r: random.Random) -> str:
    start, up, down = r.randint(2, 6), r.randint(5, 14), r.randint(2, 6)
    return f"A lift begins on floor {start}, rises {up} floors, sinks {down} floors and finally rises 2 more. Which floor is it on now?"


def knitting(r: random.Random) -> str:
    who, rows, stitches, done = r.choice(NAMES), r.randint(40, 90), r.randint(30, 60), r.randint(10, 35)
    return f"A scarf pattern has {rows} rows with {stitches} stitches per row. {who} has finished {done} rows. How many stitches are still to be knitted?"


def bakery_trays(r: random.Random) -> str:
    trays, rolls, burnt, bag = r.randint(4, 12), r.choice([12, 18, 24]), r.choice([6, 12]), 6
    return f"Out of the oven come {trays} trays, each holding {rolls} rolls, but {burnt} rolls are burnt. The good ones go into bags of {bag}. How many bags are filled?"


def charity_run(r: random.Random) -> str:
    who, laps, metres, pledge = r.choice(NAMES), r.randint(6, 24), r.choice([250, 400, 500]), r.randint(2, 7)
    return f"In a charity run {who} completes {laps} laps of {metres} metres, and a sponsor gives {pledge} dollars for each lap. How far does {who} run, and how much money is raised?"


def candle(r: random.Random) -> str:
    burn, hours = r.choice([2, 3, 4]), r.randint(3, 8)
    return f"A candle that is {burn * hours + r.randint(3, 12)} centimetres tall burns down {burn} centimetres every hour. How tall is it after {hours} hours?"


def rope(r: random.Random) -> str:
    pieces, length, rest = r.randint(5, 14), r.randint(3, 9), r.randint(1, 2)
    return f"A rope of {pieces * length + rest} metres is cut into pieces that are {length} metres long. How many whole pieces are there, and what length is wasted?"


def calendar(r: random.Random) -> str:
    day = r.choice("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
    return f"Today is {day}. Which day of the week will it be in {r.randint(10, 90)} days? Explain with remainders."


def hens(r: random.Random) -> str:
    who, birds, eggs, weeks = r.choice(NAMES), r.randint(5, 20), r.randint(3, 6), r.randint(2, 6)
    return (
        f"Each of {who}'s {birds} hens lays {eggs} eggs a week. How many full cartons of 10 can {who} sell over {weeks} weeks?"
    )


def taxi(r: random.Random) -> str:
    base, per, km = r.randint(3, 6), r.choice([1.5, 2, 2.5]), r.randint(4, 30)
    return f"The taxi meter begins at {base} dollars and climbs by {per} dollars with each kilometre driven. Someone rides {km} kilometres and hands over a 100-dollar note. How much comes back?"


def lottery(r: random.Random) -> str:
    one, two = r.choice(
        [
            ("a coin", "heads and a six"),
            ("two coins", "exactly one head"),
            ("two dice", "a total of seven"),
            ("three coins", "no heads at all"),
            ("a die twice", "the same number both times"),
            ("two dice", "a total above ten"),
        ]
    )
    if one == "a coin":
        return f"Someone tosses a coin and rolls a die. What is the chance to get {two}?"
    return f"Someone throws {one}. What is the chance to get {two}? List the favourable outcomes."


def map_scale(r: random.Random) -> str:
    scale, cm = r.choice([2, 4, 5, 10]), r.randint(3, 18)
    return f"On a hiking map one centimetre stands for {scale} kilometres. Two huts lie {cm} centimetres apart on the map. How long does a walker at {r.choice([2, 4, 5])} kilometres per hour need between them?"


def shadow(r: random.Random) -> str:
    pole, factor, height = r.randint(2, 4), r.choice([2, 3]), r.randint(5, 15)
    return f"A pole {pole} metres high throws a shadow of {pole * factor} metres. At the same moment a tower's shadow measures {height * factor} metres. What is the tower's height?"


def photo(r: random.Random) -> str:
    files, size, card = r.randint(20, 90) * 10, r.choice([4, 5, 8]), r.choice([8, 16, 32])
    return f"A photo takes up {size} megabytes. Will {files} of them fit on a memory card of {card} gigabytes (1 gigabyte = 1,000 megabytes), and how much space is free or lacking?"


BY_HAND = lines("""
A quiz gives 4 points per right answer and takes away 1 point per wrong one. Noor answers all 20 questions and scores 65. How many were right?
Which is the better deal for a student: 3 weekly tickets at 22 dollars or 1 monthly ticket at 70 dollars, if school lasts 3 weeks this month?
Seven islands are each linked to every other island by one ferry line. How many lines are there? Describe how you count them.
Two candles are lit together. One lasts 6 hours, the other 9 hours. What part of each is left after 3 hours?
Simplify 3(x + 4) - 2x and evaluate the expression for x = 7.
A robot vacuum cleans 18 square metres, then must charge for an hour. Cleaning 18 square metres takes 40 minutes. How long does it need for 54 square metres?
Find the least common multiple of 12 and 18 and explain where it is useful.
What is the greatest common divisor of 84 and 126? Use prime factors.
Write 0.375 as a fraction in lowest terms.
The angles of a triangle are in the proportion 2 : 3 : 4. What are they?
Estimate 397 times 21 first, then compute it exactly.
A cinema ticket rises from 8 dollars to 10 dollars. By what percentage did it go up?
How many different three-letter codes can be made from A, B and C when letters may repeat?
A bus holds 48 passengers. How many buses are needed for 310 pupils and 14 teachers?
Round 6,748 to the nearest hundred and to the nearest thousand, and say why.
A playlist of 14 tracks lasts 49 minutes. Three tracks of 4 minutes each are deleted. How long is the playlist now, and what is the new mean length?
""")


def families() -> Families:
    """Held-out story forms by name."""
    forms = (
        aquarium,
        elevator,
        knitting,
        bakery_trays,
        charity_run,
        candle,
        rope,
        calendar,
        hens,
        taxi,
        map_scale,
        shadow,
        photo,
    )
    rows = {f"math_heldout_{form.__name__}": generated(f"heldout {form.__name__}", form, 6) for form in forms}
    rows["math_heldout_lottery"] = generated("heldout lottery", lottery, 5)
    rows["math_heldout_by_hand"] = BY_HAND
    return rows
