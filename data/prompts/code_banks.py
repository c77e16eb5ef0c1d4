"""Banks of the code training prompts: function tasks, snippets, broken snippets, entities."""

from .families import blocks, records

# signature | what the function does
TASKS = records("""
count_vowels(text)|counts the vowels in a string, ignoring case
second_largest(values)|returns the second largest distinct number of a list, or None if there is none
is_leap_year(year)|tells whether a year is a leap year
celsius_to_fahrenheit(degrees)|converts degrees Celsius to Fahrenheit, rounded to one decimal
reverse_words(sentence)|reverses the order of the words in a sentence
merge_dicts(first, second)|merges two dictionaries and adds the values of shared keys
chunk(items, size)|splits a list into consecutive pieces of a given size
is_anagram(first, second)|checks whether two words are anagrams of each other
initials(name)|turns a full name such as "ada may lovelace" into its initials
running_total(values)|returns the list of running totals of a list of numbers
most_common_word(text)|finds the word that occurs most often in a text
flatten(nested)|flattens a list of lists by one level
clamp(value, low, high)|limits a number to a closed range
caesar(text, shift)|shifts every letter of a text by a fixed number of places
roman(number)|writes a number below 4000 in Roman numerals
digits_sum(number)|adds up the decimal digits of a non-negative integer
unique(items)|removes duplicates from a list and keeps the order of first occurrence
slugify(title)|turns a blog title into a lower-case slug with hyphens
mask_email(address)|hides all but the first letter of the name in an e-mail address
parse_time(text)|converts a time such as "2h 15m" into minutes
median(values)|computes the median of a list of numbers without using a library
transpose(matrix)|swaps the rows and columns of a matrix given as a list of lists
compress(text)|shortens runs of the same letter, so that "aaab" becomes "a3b1"
rotate(items, steps)|moves the elements of a list to the right by a number of steps
group_by_length(words)|groups words by their length in a dictionary
is_valid_password(text)|accepts a password only if it has ten characters, a digit and an upper-case letter
gcd(a, b)|computes the greatest common divisor with the algorithm of Euclid
primes_up_to(limit)|lists all prime numbers up to a limit with a sieve
fibonacci(count)|returns the first numbers of the Fibonacci sequence
balanced(text)|checks whether the brackets in a string are balanced
binary_search(items, target)|returns the index of a target in a sorted list, or -1
bubble_sort(items)|sorts a list in place by swapping neighbours
intersection(first, second)|returns the sorted values that two lists have in common
title_case(text)|capitalises every word except "and", "of" and "the"
count_lines(path)|counts the non-empty lines of a text file
read_config(path)|reads "key = value" lines from a file into a dictionary and skips comments
days_between(start, end)|returns the number of days between two ISO dates
age(birthday, today)|computes a person's age in whole years from two dates
format_price(cents)|formats an amount of cents as dollars with a thousands separator
to_binary(number)|converts a positive integer to a binary string without using bin
is_palindrome(text)|tests whether a text reads the same in both directions, ignoring spaces and punctuation
longest_word(sentence)|returns the longest word of a sentence, and the first one if there is a tie
invert(mapping)|swaps the keys and values of a dictionary
moving_average(values, window)|computes the moving average of a list
sum_nested(items)|adds all numbers in a list that may hold further lists
pascal_row(n)|returns row n of Pascal's triangle
dot(first, second)|computes the dot product of two vectors and raises an error if their lengths differ
shuffle_deck(seed)|returns a shuffled deck of 52 cards for a given seed
grade(score)|maps a score from 0 to 100 to a letter from A to F
bmi(weight, height)|computes the body mass index and names its category
split_bill(total, people)|divides a bill fairly so that the cents add up exactly
next_weekday(date)|returns the first weekday after a date
hex_to_rgb(code)|converts a colour such as "#ff8800" to three integers
vowels_to_stars(text)|replaces each vowel in a text with a star
power_set(items)|lists all subsets of a small list
find_missing(values)|finds the missing number in a list that holds 1 to n with one gap
max_profit(prices)|finds the best profit from buying once and selling later
two_sum(values, target)|finds two positions whose values add up to a target
zip_longest_with(first, second, fill)|pairs up two lists and pads the shorter one
word_lengths(text)|maps each word in a text to its length
retry(action, times)|calls an action again after an exception, at most a given number of times
parse_query(url)|extracts the query parameters of a URL into a dictionary
human_size(count)|writes a number of bytes as B, KB, MB or GB
remove_tags(html)|removes HTML tags from a string
is_sorted(items)|checks whether a list is in ascending order
interleave(first, second)|alternates the elements of two lists
top_k(values, k)|returns the k largest values in descending order
histogram(values)|prints a text histogram of a list of small integers
sum_of_squares(limit)|adds the squares of the numbers from 1 to a limit
swap_case(text)|turns upper-case letters into lower-case ones and the other way round
collatz(start)|returns the Collatz sequence from a starting number down to 1
validate_isbn(code)|checks the check digit of a ten-digit ISBN
wrap(text, width)|breaks a text into lines that are no longer than a width
countdown(seconds)|formats a number of seconds as minutes and seconds such as 03:07
diagonal_sum(matrix)|adds the numbers on the main diagonal of a square matrix
common_prefix(words)|finds the longest prefix shared by all words in a list
""")

SNIPPETS = blocks("""
total = 0
for n in range(1, 6):
    if n % 2 == 0:
        continue
    total += n * n
print(total)
---
words = ["tea", "milk", "tea", "bread"]
counts = {}
for word in words:
    counts[word] = counts.get(word, 0) + 1
print(sorted(counts.items()))
---
def mystery(n):
    if n < 2:
        return n
    return mystery(n - 1) + mystery(n - 2)

print(mystery(7))
---
grid = [[0] * 3 for _ in range(2)]
grid[0][1] = 5
print(grid)
---
text = "draft"
print(text[::-1], text[1:3], text[-2:])
---
stack = []
for symbol in "a(b)c":
    if symbol == "(":
        stack.append(symbol)
    elif symbol == ")":
        stack.pop()
print(len(stack) == 0)
---
prices = {"pen": 2, "book": 9, "bag": 25}
cheap = [name for name, price in prices.items() if price < 10]
print(cheap)
---
def add(item, basket=None):
    basket = [] if basket is None else basket
    basket.append(item)
    return basket

print(add("egg"), add("jam"))
---
a = [1, 2, 3]
b = a
b.append(4)
print(a, a is b)
---
from collections import Counter
letters = Counter("banana")
print(letters.most_common(2))
---
def squares(limit):
    n = 1
    while n * n <= limit:
        yield n * n
        n += 1

print(list(squares(30)))
---
try:
    value = int("12a")
except ValueError:
    value = -1
finally:
    print("done")
print(value)
---
pairs = zip("abc", [1, 2, 3])
print({key: value ** 2 for key, value in pairs})
---
names = ["Zoe", "adam", "Mia"]
print(sorted(names), sorted(names, key=str.lower))
---
n = 37
bits = ""
while n > 0:
    bits = str(n % 2) + bits
    n //= 2
print(bits)
---
matrix = [[1, 2], [3, 4], [5, 6]]
print([list(row) for row in zip(*matrix)])
---
class Counter:
    def __init__(self):
        self.value = 0

    def step(self):
        self.value += 2
        return self

print(Counter().step().step().value)
---
with open("notes.txt") as file:
    lines = [line.strip() for line in file if line.strip()]
print(f"{len(lines)} lines, longest: {max(lines, key=len)}")
---
def outer(start):
    def inner(step):
        nonlocal start
        start += step
        return start
    return inner

move = outer(10)
print(move(5), move(-2))
---
values = [3, 8, 1, 9, 4]
best = values[0]
for value in values[1:]:
    if value > best:
        best = value
print(best)
---
x, y = 3, 8
x, y = y, x + y
print(x, y, x > y or "smaller")
---
seen = set()
for number in [4, 7, 4, 9, 7]:
    if number in seen:
        print("again", number)
    seen.add(number)
---
import json
data = json.loads('{"name": "Ada", "tags": ["math", "code"]}')
print(data["name"].upper(), len(data["tags"]))
---
def apply_twice(function, value):
    return function(function(value))

print(apply_twice(lambda v: v * 3 - 1, 2))
---
for row in range(1, 5):
    print(" " * (4 - row) + "*" * (2 * row - 1))
---
numbers = list(range(10))
print(numbers[2:8:2], sum(numbers) / len(numbers))
---
def greet(name, *, loud=False):
    message = f"Hello, {name}"
    return message.upper() + "!" if loud else message

print(greet("Sam"), greet("Sam", loud=True))
---
low, high = 0, 100
guesses = 0
while low < high:
    middle = (low + high) // 2
    guesses += 1
    if middle < 63:
        low = middle + 1
    else:
        high = middle
print(low, guesses)
""")

# what is wrong | code
BUGS = [
    tuple(block.split("\n", 1))
    for block in blocks("""
It should add all numbers, but it returns after the first one.
def total(values):
    result = 0
    for value in values:
        result += value
        return result
---
The last element is never checked.
def contains(items, target):
    for i in range(len(items) - 1):
        if items[i] == target:
            return True
    return False
---
Every call shares the same list.
def collect(item, items=[]):
    items.append(item)
    return items
---
It crashes for an empty list.
def mean(values):
    return sum(values) / len(values)
---
It never ends.
n = 10
while n > 0:
    print(n)
    n - 1
---
It raises a KeyError for new words.
counts = {}
for word in text.split():
    counts[word] += 1
---
It skips some even numbers.
for n in numbers:
    if n % 2 == 0:
        numbers.remove(n)
---
It prints the text "name" instead of the value.
name = "Lina"
print("Hello, {name}!")
---
It joins the digits instead of adding them.
a = input("First number: ")
b = input("Second number: ")
print(a + b)
---
It says that 1 and 0 are prime.
def is_prime(n):
    for d in range(2, n):
        if n % d == 0:
            return False
    return True
---
It returns None.
def double(values):
    [v * 2 for v in values]
---
Changing one row changes all rows.
board = [["."] * 3] * 3
board[0][0] = "X"
---
It raises a RecursionError.
def factorial(n):
    return n * factorial(n - 1)
---
The comparison is always false.
answer = input("Continue? ")
if answer is "yes":
    print("Going on")
---
It should sort by age, but sorts by name.
people = [("Ann", 41), ("Bob", 29)]
people.sort(key=lambda person: person[0])
---
It fails with UnboundLocalError.
counter = 0
def increase():
    counter += 1
increase()
---
The file is never closed when an error occurs.
file = open("data.txt")
process(file.read())
file.close()
---
It catches every error and hides it.
try:
    save(record)
except:
    pass
---
It prints only the last name.
for name in ["Ana", "Ben", "Cy"]:
    message = "Hi " + name
print(message)
---
It should count down from 5 to 1, but prints nothing.
for i in range(5, 0):
    print(i)
---
JavaScript: the sum comes out as "0123".
let sum = "0";
for (const n of [1, 2, 3]) {
  sum += n;
}
console.log(sum);
---
JavaScript: the timer prints 3 three times.
for (var i = 0; i < 3; i++) {
  setTimeout(() => console.log(i), 100);
}
---
JavaScript: the list prints as a pending promise.
function load() {
  const data = fetch("/api/items").then((r) => r.json());
  console.log(data);
}
---
SQL: it returns no row although some prices are missing.
SELECT name FROM product WHERE price = NULL;
---
SQL: the database complains about the column "city".
SELECT city, name, COUNT(*) FROM customer GROUP BY city;
---
Shell: it fails for file names with spaces.
for f in $(ls *.txt); do
  cp $f backup/
done
---
C: the program writes past the end of the array.
int a[5];
for (int i = 0; i <= 5; i++) {
    a[i] = i;
}
---
Python: the average of 3 and 4 comes out as 3.
average = (3 + 4) // 2
---
The dictionary changes while it is being read.
for key in stock:
    if stock[key] == 0:
        del stock[key]
---
It never finds words with capital letters.
def find(word, words):
    return word.lower() in words
""")
]

# singular | plural | text field | number field | grouping field
ENTITIES = records("""
book|books|title|pages|author
customer|customers|name|age|city
product|products|name|price|category
employee|employees|name|salary|department
order|orders|customer_name|total|status
movie|movies|title|duration|director
student|students|name|score|school
recipe|recipes|title|minutes|cuisine
flight|flights|code|distance|airline
song|songs|title|seconds|artist
city|cities|name|population|country
invoice|invoices|reference|amount|supplier
sensor|sensors|label|temperature|location
ticket|tickets|subject|priority|assignee
pet|pets|name|weight|species
player|players|nickname|goals|team
vehicle|vehicles|model|mileage|owner
article|articles|headline|word_count|section
plant|plants|name|height|family
hotel|hotels|name|rooms|region
patient|patients|name|heart_rate|ward
course|courses|title|credits|teacher
parcel|parcels|tracking_code|weight|destination
museum|museums|name|visitors|town
bridge|bridges|name|length|river
""")
