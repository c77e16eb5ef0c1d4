"""Training prompts of the domain code."""

from .code_banks import BUGS, ENTITIES, SNIPPETS, TASKS
from .families import Families, article, crossed, lines, once, records

SHELL = lines("""
find all files larger than 100 MB below the current folder
count the lines of all Python files in a folder
rename every .jpeg file in a folder to .jpg
show the ten largest folders on a disk
delete log files older than 30 days
search for the word TODO in all files and show line numbers
replace tabs with four spaces in a text file
list the processes that listen on port 8080
copy a folder to another machine over SSH
make a compressed archive of a folder without its cache directory
print the second column of a comma-separated file
show the most frequent lines of a log file
watch the end of a log file while it grows
check whether a command exists before using it in a script
loop over the numbers from 1 to 20 and create a folder for each
download a file and verify its SHA-256 checksum
show free memory and disk space in a readable form
run a script every day at six in the morning
make a script executable and put it on the PATH
stop a script at the first error
read a file line by line in Bash
compare two folders and list the files that differ
extract all e-mail addresses from a text file
set an environment variable only for one command
kill a process that uses too much memory
merge several text files into one and remove duplicate lines
measure how long a command takes
create a backup whose name contains today's date
find empty folders and remove them
change the owner of all files in a folder
convert a text file to upper case
send the output of a command both to the screen and to a file
""")

REGEX = lines("""
a date such as 2024-03-17
a time between 00:00 and 23:59
a hexadecimal colour code
a simple e-mail address
a number with an optional sign and decimals
a word that starts with a capital letter
a line that contains only spaces
a US postal code with an optional four-digit part
a file name that ends in .png or .jpg
a repeated word such as "the the"
text inside double quotes
an IPv4 address
a version number such as 1.12.3
a user name of 3 to 16 letters, digits or underscores
a hashtag in a short message
a price such as $1,299.00
a comment that starts with # in a configuration file
a licence plate of two letters, a hyphen and four digits
""")

CONCEPTS = lines("""
the difference between a list and a tuple in Python
what a hash table is and why look-ups are fast
the difference between == and is in Python
what recursion is and when a loop is better
how a stack differs from a queue
what an API is
what the big O notation says about an algorithm
the difference between a process and a thread
what a decorator does in Python
what a virtual environment is good for
how garbage collection works
what a primary key and a foreign key are
the difference between INNER JOIN and LEFT JOIN
what an index does in a database
what HTTP status codes 200, 301, 404 and 500 mean
the difference between GET and POST
what JSON is and how it compares to XML
what unit tests are and why they help
what a race condition is
the difference between compiled and interpreted languages
what a closure is in JavaScript
how async and await work
what the event loop does in a browser
the difference between let, const and var
what inheritance and composition are
what an interface is in Java
what a pointer is in C
the difference between stack and heap memory
what Unicode and UTF-8 are
why floating-point numbers are not exact
what a context manager is in Python
what a generator is and why it saves memory
how binary search works
how quicksort chooses and uses a pivot
what a linked list is and what it is bad at
what a binary tree is
how breadth-first search walks a graph
what memoisation is
what SQL injection is and how to prevent it
why passwords should be hashed with a salt
what continuous integration means
what a container image is
the difference between a library and a framework
what dependency injection is
what idempotent means for a web request
what CSS flexbox is used for
how the CSS box model works
what a cookie is and what a session is
how DNS turns a name into an address
what caching is and when it goes wrong
what a mutex is
the difference between shallow and deep copies
what technical debt is
how to choose good variable names
what a code review should look for
""")

GIT = lines("""
undo the last commit but keep the changes
see what changed in one file over time
create a branch and switch to it
merge a branch and resolve a conflict
discard all uncommitted changes in a file
rename a branch
put away unfinished work and get it back later
find out who last changed a line
remove a file from version control but keep it on disk
change the message of the last commit
ignore a folder with build results
get one commit from another branch
tag a release and push the tag
compare two branches
clean up branches that were already merged
find the commit that introduced a bug
""")

ERRORS = records("""
TypeError: can only concatenate str (not "int") to str|Python
IndexError: list index out of range|Python
KeyError: 'user_id'|Python
ModuleNotFoundError: No module named 'requests'|Python
IndentationError: expected an indented block|Python
AttributeError: 'NoneType' object has no attribute 'split'|Python
ZeroDivisionError: division by zero|Python
RecursionError: maximum recursion depth exceeded|Python
UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff|Python
ValueError: invalid literal for int() with base 10: 'abc'|Python
FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'|Python
TypeError: Cannot read properties of undefined (reading 'length')|JavaScript
ReferenceError: total is not defined|JavaScript
SyntaxError: Unexpected token < in JSON at position 0|JavaScript
Uncaught TypeError: items.map is not a function|JavaScript
NullPointerException|Java
ClassNotFoundException|Java
Segmentation fault (core dumped)|C
undefined reference to 'main'|C
permission denied|the shell
command not found: node|the shell
port 3000 is already in use|a web server
duplicate key value violates unique constraint|PostgreSQL
column "total" does not exist|PostgreSQL
fatal: not a git repository|Git
CORS policy: No 'Access-Control-Allow-Origin' header is present|a browser
""")

CLASSES = records("""
BankAccount|deposit, withdraw and balance|refuse to go below zero
ShoppingCart|add, remove and total|apply an optional discount
Stopwatch|start, stop and elapsed|work when it is started twice
Playlist|add, skip and shuffle|remember the current song
Matrix|add, multiply and transpose|check the shapes
Queue|push, pop and is_empty|use two stacks inside
Temperature|to_celsius and to_fahrenheit|reject values below absolute zero
Library|lend, give_back and available|know who has which book
Rectangle|area, perimeter and scale|support comparison by area
Dice|roll and history|take the number of sides and a seed
Inventory|add, take and low_stock|report items below a minimum
Polynomial|evaluate, derivative and __str__|store its coefficients in a list
LRUCache|get and put|drop the entry that was used longest ago
TodoList|add, complete and pending|save itself to a JSON file
Elevator|call, move and current_floor|serve requests in order
Parking|enter, leave and free_spots|keep a list of licence plates
Vector|add, scale and length|support the + operator
Thermostat|set_target and step|switch the heating with a tolerance
ContactBook|add, find and remove|search without regard to case
Tree|insert, contains and height|keep the values sorted
RateLimiter|allow and reset|permit a given number of calls per minute
Money|add and multiply|avoid rounding errors by storing cents
EventLog|record, filter and last|keep at most 100 entries
""")

WEB = lines("""
a centred login form with two fields and a button
a navigation bar that becomes a menu on small screens
a card with an image, a title and a short text
a table with striped rows and a sticky header
a button that changes colour when the mouse is over it
a photo gallery with three columns
a footer that stays at the bottom of the page
a progress bar that fills up with animation
a contact form with a name, an e-mail address and a message
a page with a sidebar and a main column
a light and a dark theme with a switch
a tooltip without JavaScript
an accordion for frequently asked questions
a pricing section with three plans
a spinning loading indicator
a counter with buttons for plus and minus
a to-do list to which items can be added
a clock that shows the current time
a search field that filters a list while typing
a warning banner that can be closed
""")

SCRIPTS = lines("""
reads a CSV file and prints the average of each numeric column
renames all photos in a folder by the date on which they were taken
asks five quiz questions and prints the score
counts the words in all text files of a folder
converts a JSON file to CSV
plays rock, paper, scissors against the user
prints a calendar of the current month
checks a list of URLs and reports those that do not answer
simulates 1,000 rolls of two dice and prints the share of each sum
removes duplicate lines from a file
generates a random password of a chosen length
prints the multiplication table up to 12 in aligned columns
guesses a number between 1 and 100 that the user has in mind
watches a folder and prints the names of new files
splits a large text file into files of 1,000 lines
draws a bar chart of monthly sales with matplotlib
sorts the files of a folder into subfolders by extension
keeps a simple address book in an SQLite database
converts amounts between three currencies with fixed rates
prints the ten most frequent words of a book
sends a reminder to the terminal every 20 minutes
computes a loan repayment plan
finds files with the same content
turns a Markdown list into an HTML list
reads temperatures from the keyboard and prints the minimum and maximum
""")

PANDAS = (
    "Using pandas, load {1}.csv and show the average {3} for each {4}.",
    "How do I sort a pandas DataFrame of {1} by {3} in descending order and keep the first ten rows?",
    "A DataFrame of {1} has missing values in the column {3}. Show how to fill them with the median of the same {4}.",
    "Write pandas code that reads {1}.csv, drops duplicate rows and counts the {1} per {4}.",
)
SQL_SELECT = (
    "Write an SQL query that lists the five {1} with the highest {3}. The table {1} has the columns id, {2}, {3} and {4}.",
    "A table {1} has the columns id, {2}, {3} and {4}. Write SQL that shows the average {3} per {4}, highest first.",
    "Given a table {1} (id, {2}, {3}, {4}), write SQL that finds every {4} with more than ten {1}.",
    "In SQL, how do I find the {1} whose {3} is above the average? The table is called {1} and has the column {3}.",
    "Write an SQL statement that raises {3} by 10 percent for all {1} of one {4} in the table {1}.",
    "The table {1} has one row per {0} with {2}, {3} and {4}. Write SQL that finds values of {2} that occur more than once.",
)


def entity_families() -> Families:
    """Data modelling around the entities: classes, tables, queries, interfaces, forms."""
    rows = {
        "code_dataclass": (
            "Define a Python dataclass for {5} with the fields {2}, {3} and {4}, and create two examples.",
            "Write a Python dataclass for {5} with {2}, {3} and {4}, and a function that returns the average {3} of a list of {1}.",
        ),
        "code_create_table": (
            "Write a CREATE TABLE statement for {1} with a primary key and the columns {2}, {3} and {4}. Add sensible types.",
            "Design an SQL table for {1} ({2}, {3}, {4}) and insert three example rows.",
        ),
        "code_typescript": (
            "Write a TypeScript interface for {5} with {2}, {3} and {4}, and a typed array with two {1}.",
            "In TypeScript, write a function that takes an array of {1} with {2}, {3} and {4} and groups them by {4}.",
        ),
        "code_json": (
            "Give an example of a JSON document with three {1}. Each has {2}, {3} and {4}.",
            "Show a JSON array of two {1} with {2}, {3} and {4}, and Python code that reads it and prints each {2}.",
        ),
        "code_endpoint": (
            "Write a small Flask application with one route that returns all {1} as JSON and one that adds {5} with {2} and {3}.",
            "Sketch a REST API for {1} with {2}, {3} and {4}: list the routes, methods and an example response.",
        ),
        "code_sort_filter": (
            "In Python, {1} are stored as dictionaries with the keys {2}, {3} and {4}. Sort them by {3} and print the {2} of each.",
            "I have a list of dictionaries for {1} with {2}, {3} and {4}. Filter it by {4} with a list comprehension.",
            "In JavaScript, given an array of {1} with {2} and {3}, find the one with the largest {3}.",
        ),
    }
    entities = [(*entity, article(entity[0])) for entity in ENTITIES]
    families = {name: crossed(name, forms, entities, 24) for name, forms in rows.items()}
    families["code_sql_query"] = crossed("sql", SQL_SELECT, ENTITIES, 50)
    families["code_pandas"] = crossed("pandas", PANDAS, ENTITIES, 30)
    return families


def task_families() -> Families:
    """The function tasks in several kinds of request."""
    languages = ("JavaScript", "Java", "Go", "C", "Rust", "C++", "Ruby", "TypeScript", "C#", "PHP", "Kotlin")
    # Tasks that name something of Python are left out.
    general = [task for task in TASKS if not any(word in task[1] for word in ("None", " bin", "dictionar", "in place"))]
    other = [(*task, languages[i % len(languages)]) for i, task in enumerate(general)]
    return {
        "code_function": crossed("function", ("Write a Python function `{0}` that {1}.", "I need `{0}` in Python, which {1}. Please keep it short."), TASKS, 55),
        "code_docstring": once("docstring", ("Implement `{0}` in Python: it {1}. Add type hints, a docstring and one example call.",), TASKS, 40),
        "code_tests": once("tests", ("Write three pytest tests for a Python function `{0}` that {1}.", "Which edge cases should I test for a function `{0}` that {1}? Give a short list."), TASKS, 36),
        "code_plan": once("plan", ("Describe in plain words how to write a function that {1}. Number the steps; no code is needed.", "Give pseudocode for a function that {1}."), TASKS, 36),
        "code_language": once("language", ("Write a function in {2} that {1}.", "In {2}, how would you write a function that {1}?"), other, 50),
        "code_explain_task": once("explain_task", ("Write a Python function that {1}, then explain each line in one sentence.",), TASKS, 30),
    }  # fmt: skip


def snippet_families() -> Families:
    """Reading, mending and rewriting given code."""
    fence = "\n\n```python\n{0}\n```"
    return {
        "code_output": once("output", ("What does this program print?" + fence, "What is the output of the following code, and why?" + fence), SNIPPETS),
        "code_explain": once("explain", ("Explain what this Python code does." + fence, "Go through this code line by line for a beginner." + fence), SNIPPETS),
        "code_comments": once("comments", ("Add helpful comments to this code without changing it." + fence,), SNIPPETS, 22),
        "code_port": once("port", ("Translate this Python code to JavaScript." + fence,), SNIPPETS, 22),
        "code_refactor": once("refactor", ("Rewrite this code with clearer names and put it into a function." + fence,), SNIPPETS, 22),
        "code_fix": once("fix", ("This code has a bug. {0} Fix it and explain the mistake.\n\n```\n{1}\n```", "{0} Please correct the code.\n\n```\n{1}\n```"), BUGS),
        "code_review": once("review", ("Review this code in a few sentences. What would you change?\n\n```\n{1}\n```",), BUGS, 20),
    }  # fmt: skip


def families() -> Families:
    """All code training families by name."""
    return {
        **task_families(),
        **snippet_families(),
        **entity_families(),
        "code_shell": once("shell", ("Which shell command can I use to {0}?", "In a Linux terminal, how do I {0}?", "Give me a Bash command to {0} and explain its options."), SHELL),
        "code_regex": once("regex", ("Write a regular expression that matches {0} and explain its parts.", "How can I match {0} with a regex in Python? Show code."), REGEX),
        "code_concept": once("concept", ("Explain {0}.", "Explain {0}. Give a short example.", "Explain to a new programmer, in a few sentences, {0}."), CONCEPTS),
        "code_git": once("git", ("How do I {0} with Git?", "Show the Git commands to {0}."), GIT),
        "code_error": once("error", ("I get this message from {1}: \"{0}\". What does it mean and how do I fix it?", "What are common causes of \"{0}\" in {1}?"), ERRORS),
        "code_class": once("class", ("Write a Python class `{0}` with the methods {1}. It should {2}.", "Design a class `{0}` in Python. Methods: {1}. Requirement: it should {2}."), CLASSES),
        "code_web": once("web", ("Write HTML and CSS for {0}.", "With HTML, CSS and, if needed, JavaScript, show a minimal example of {0}."), WEB),
        "code_script": once("script", ("Write a short Python script that {0}.",), SCRIPTS),
    }  # fmt: skip
