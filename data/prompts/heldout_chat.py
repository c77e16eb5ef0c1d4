"""Held-out prompts of the domain chat: own wordings and own topics."""

from .families import Families, lines, once, records

CURIOUS = lines(
    """
a candle goes out under a glass|popcorn pops|a cricket chirps louder on warm nights|bridges have gaps between their plates
honey almost never spoils|a bicycle stays upright while it rolls|salt is spread on icy roads|the ears hurt during a landing
a wooden spoon feels warmer than a metal one|flamingos are pink|geysers erupt at regular times|we yawn when others yawn
""".replace("|", "\n")
)

FIGURES = lines(
    """
Rachel Carson|Marco Polo|Grace Hopper|Ludwig van Beethoven|Harriet Tubman|Ibn Battuta|Katherine Johnson|Alan Turing|Sacagawea
""".replace("|", "\n")
)

CITIES = "Kyoto|Istanbul|Lisbon|Nairobi|Montreal|Prague|Cusco|Marrakesh|Copenhagen".split("|")

CHOICES = records("""
a fountain pen|a ballpoint pen
a wood stove|a gas heater
a podcast|an audiobook
a tent|a camper van
sourdough|yeast bread
a piano|an accordion
a sprint|a marathon
ferns|mosses
a mayor|a governor
""")

WORRIES = lines("""
Our choir has lost half of its members since spring.
The bathroom mirror steams up so badly that the paint is peeling.
My grandfather would like to video call us but dislikes computers.
A classmate copies my answers in every test.
I bought concert tickets and now I am ill.
The pigeons on my roof wake me at five.
I said yes to too many favours this month.
My new shoes hurt after ten minutes.
I lost my voice and have to give a lecture tomorrow.
""")

DIRECT = lines("""
Name the four chambers of the human heart and what flows through them.
Which countries border Austria?
In what order do the colours of a rainbow appear?
Who built Machu Picchu, and what was it for?
What are tectonic plates made of?
How did people keep food fresh before there was electricity?
Where do monarch butterflies spend the winter?
What is the function of the kidneys?
Which languages developed from Latin?
Why was tea so important for the British Empire?
What do the rings of a tree trunk tell us?
How many strings does a cello have, and how are they tuned?
""")

THINGS = lines(
    """
a sundial|an umbrella|a sewing machine|a thermos flask|a zip fastener|a lighthouse lens|a windmill|a pair of scissors|a wheelbarrow
""".replace("|", "\n")
)

SPEECHES = lines(
    """
the retirement of a school caretaker|the opening of a skate park|a friend's thirtieth birthday|the last day of a summer camp
a prize for a local beekeeper|the naming of a rescue boat|a reunion of former classmates|the hundredth volume in a village library
""".replace("|", "\n")
)

SCENES = lines(
    """
a ticket inspector and a passenger with a parrot|a ghost who wants to rent a flat|two gardeners who argue over a giant pumpkin
a king who orders a pizza|a tourist who asks a statue for directions|a tailor and an invisible customer
a chess piece that refuses to move|a librarian and a very loud reader
""".replace("|", "\n")
)

BUDGETS = lines(
    """
100 dollars and a free Saturday in autumn|two hours and a kitchen full of apples|an empty wall and three pots of paint
a box of old buttons and a sewing kit|a rainy camping weekend with teenagers|a stack of unused postcards
one suitcase and a month in a cold country|a long flight without any screen
""".replace("|", "\n")
)

MYTHS = lines(
    """
lightning never strikes the same place twice|goldfish forget everything after a few seconds|we use only a tenth of our brains
cracking knuckles harms the joints|bulls get angry at the colour red|the Great Wall is visible from the Moon
sugar makes children hyperactive|bats are blind|hair grows back thicker after shaving
""".replace("|", "\n")
)


def families() -> Families:
    """All held-out chat families by name."""
    return {
        "chat_heldout_curious": once("h curious", ("How come {0}?", "I have noticed that {0}. What is the reason?"), CURIOUS),
        "chat_heldout_figure": once("h figure", ("Sum up the achievements of {0} for a poster in a classroom.", "Which single moment best shows the character of {0}?"), FIGURES),
        "chat_heldout_city": once("h city", ("Suggest a walk through {0} that takes half a day.", "What did {0} look like two hundred years ago, and what is different now?"), CITIES),
        "chat_heldout_choice": once("h choice", ("When would an expert prefer {0} over {1}, and when not?", "My friends cannot agree about {0} and {1}. Settle it fairly."), CHOICES),
        "chat_heldout_worry": once("h worry", ("{0} How would you handle this?", "{0} Tell me what to try first, second and third."), WORRIES),
        "chat_heldout_direct": DIRECT,
        "chat_heldout_thing": once("h thing", ("Who came up with {0}, and how does it do its job?", "Describe {0} to someone who has never seen one."), THINGS),
        "chat_heldout_speech": once("h speech", ("Draft a two-minute toast for {0}.", "We need warm words for {0}. Could you write them?"), SPEECHES),
        "chat_heldout_scene": once("h scene", ("Invent a funny dialogue between characters: {0}.", "Here is a premise: {0}. Turn it into one page of fiction."), SCENES),
        "chat_heldout_budget": once("h budget", ("All I have is {0}. Suggest something good to do with it.", "Make the most of this situation: {0}."), BUDGETS),
        "chat_heldout_myth": once("h myth", ("True or false: {0}? Give your reasons.", "My uncle insists that {0}. Is he right?"), MYTHS),
    }  # fmt: skip
