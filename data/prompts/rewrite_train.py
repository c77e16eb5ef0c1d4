"""Training prompts of the domain rewrite: a passage in the prompt and one thing to do with it."""

import random
import re

from .families import MAX_FAMILY, Families
from .passages import passages

# family | kinds of passages it suits (empty: all) | wordings; `{0}` is the passage
ANY: tuple[str, ...] = ()
LETTERS = ("mail",)
PUBLIC = ("notice", "news", "report")
TOLD = ("story", "person", "news")
FAMILIES: list[tuple[str, tuple[str, ...], int, tuple[str, ...]]] = [
    ("one_sentence", ANY, 36, ("Summarize the following text in one sentence.\n\n{0}", "Give the main point of this text in a single sentence:\n\n{0}", "{0}\n\nSummarize this in one sentence.")),
    ("two_sentences", ANY, 34, ("Summarize this passage in two sentences.\n\n{0}", "{0}\n\nWrite a summary of two sentences.")),
    ("bullets", ANY, 38, ("Turn the text below into three bullet points.\n\n{0}", "List the most important points of this text as bullets.\n\n{0}", "{0}\n\nRewrite this as a bulleted list.")),
    ("title", ANY, 30, ("Suggest three titles for this text.\n\n{0}", "Write a headline for the following text and one line below it.\n\n{0}")),
    ("half", ANY, 36, ("Shorten this text to about half its length without losing important facts.\n\n{0}", "Make this more concise:\n\n{0}", "Cut everything that is not needed from this text.\n\n{0}")),
    ("simple", ANY, 36, ("Rewrite this text in simple language for a child of eight.\n\n{0}", "Rewrite the text with short sentences and easy words.\n\n{0}")),
    ("own_words", ANY, 36, ("Paraphrase the following text.\n\n{0}", "Say the same in other words:\n\n{0}", "Rewrite this passage so that it sounds different but means the same.\n\n{0}")),
    ("keywords", ANY, 24, ("List five keywords for this text.\n\n{0}", "Which words best describe the content of this text? Give six.\n\n{0}")),
    ("questions", ANY, 34, ("Write three questions that this text answers, with the answers.\n\n{0}", "Make a short reading test about this text: three questions and their answers.\n\n{0}")),
    ("true_false", ANY, 24, ("Write two true statements and one false statement about this text and mark the false one.\n\n{0}",)),
    ("post", ANY, 30, ("Turn this into a short post for social media.\n\n{0}", "Write a message of at most 40 words that tells a friend about this:\n\n{0}")),
    ("proofread", ANY, 38, ("Correct the punctuation and capital letters in this text.\n\n{0}", "The following text was typed in a hurry. Write it out properly.\n\n{0}")),
    ("order", ("steps", "story", "news", "info", "person"), 24, ("List what happens in this text in the right order.\n\n{0}", "Number the steps or events described here.\n\n{0}")),
    ("scrambled", ("info", "story", "steps", "person", "news"), 30, ("The sentences of this text are in the wrong order. Put them in a sensible order.\n\n{0}",)),
    ("details", ("mail", "notice", "news", "report", "review", "person", "talk"), 36, ("Extract all names, places, days and numbers from this text.\n\n{0}", "Who, what, when and where? Answer from the text.\n\n{0}")),
    ("json", ("mail", "notice", "news", "report", "review", "person"), 28, ("Extract the key facts from this text as a JSON object.\n\n{0}", "Turn the information in this text into a small table with two columns.\n\n{0}")),
    ("formal", ("mail", "review", "talk", "opinion", "notice"), 32, ("Rewrite this text in a formal tone.\n\n{0}", "Make the following text sound more professional.\n\n{0}")),
    ("friendly", ("mail", "notice", "report", "news", "review"), 36, ("Rewrite this text in a warm and friendly tone.\n\n{0}", "Rewrite this as if you were telling a good friend.\n\n{0}")),
    ("reply", LETTERS, 24, ("Write a short, polite reply to this message.\n\n{0}", "Answer this e-mail in three or four sentences.\n\n{0}")),
    ("tasks", ("mail", "notice"), 28, ("List what the reader has to do according to this text.\n\n{0}", "Make a checklist from this message.\n\n{0}")),
    ("present", ("story", "news", "person"), 30, ("Rewrite this text in the present tense.\n\n{0}", "Change the tense of this text to the future.\n\n{0}")),
    ("first_person", TOLD, 30, ("Retell this text in the first person.\n\n{0}", "Tell this from the point of view of one of the people in it.\n\n{0}")),
    ("continue", ("story", "talk"), 24, ("Continue this text with three more sentences.\n\n{0}", "Write a different ending for this text.\n\n{0}")),
    ("dialogue", ("story", "info", "opinion", "mail"), 24, ("Turn this text into a short dialogue between two people.\n\n{0}",)),
    ("opposite", ("opinion", "review"), 12, ("Write a text of the same length that takes the opposite view.\n\n{0}",)),
    ("feeling", ("review", "opinion", "mail", "story"), 28, ("What is the mood of this text? Name the words that show it.\n\n{0}", "Is this text positive, negative or mixed? Explain briefly.\n\n{0}")),
    ("pros_cons", ("review", "opinion"), 12, ("List the advantages and disadvantages that are mentioned in this text.\n\n{0}",)),
    ("terms", ("info",), 26, ("Explain the difficult words in this text.\n\n{0}", "Write a small glossary for this text with four entries.\n\n{0}")),
    ("advice", ("info", "report", "steps"), 24, ("What can a reader learn from this text for everyday life?\n\n{0}", "Which fact in this text is the most surprising, and why?\n\n{0}")),
    ("announce", PUBLIC, 20, ("Rewrite this as an announcement that is read aloud over a loudspeaker.\n\n{0}",)),
    ("report_speech", ("talk", "mail"), 14, ("Report in a few sentences what is said in this text, without quoting it.\n\n{0}",)),
]  # fmt: skip


def hurried(text: str) -> str:
    """`text` as typed in a hurry: no capitals and hardly any punctuation."""
    return re.sub(r"[,;:\"]|\.(?= )", "", text).lower()


def scramble(text: str, rng: random.Random) -> str:
    """The sentences of `text` in another order."""
    parts = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
    order = list(parts)
    while order == parts:
        rng.shuffle(order)
    return " ".join(order)


def families() -> Families:
    """All rewrite training families by name; the passages are spread evenly over the families."""
    bank = passages()
    used = [0] * len(bank)
    found: Families = {}
    # Families that suit few kinds choose first, so that no passage is left to carry them all.
    for name, kinds, count, forms in sorted(FAMILIES, key=lambda family: len(family[1]) or 99):
        rng = random.Random(f"rewrite {name}")
        suited = [i for i, (kind, _) in enumerate(bank) if not kinds or kind in kinds]
        rng.shuffle(suited)
        chosen = sorted(suited, key=lambda i: used[i])[: min(count, MAX_FAMILY)]
        assert len(chosen) == count, f"family {name}: only {len(chosen)} passages"
        rows = []
        for row, i in enumerate(chosen):
            used[i] += 1
            text = bank[i][1]
            text = hurried(text) if name == "proofread" else scramble(text, rng) if name == "scrambled" else text
            rows.append(forms[row % len(forms)].format(text))
        found[f"rewrite_{name}"] = rows
    return found
