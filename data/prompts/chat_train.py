"""Training prompts of the domain chat: questions, explanations, advice, lists and comparisons."""

from .families import Families, crossed, lines, once, records

PHENOMENA = lines(
    """
why the sky is blue|why leaves change colour in autumn|how rainbows form|why the sea is salty|how volcanoes erupt
what causes earthquakes|how tides work|why we have seasons|how clouds form|what lightning is|how snowflakes get their shape
why ice floats on water|how bees make honey|how birds find their way on long journeys|why cats purr|how spiders build webs
how plants turn sunlight into food|why onions make us cry|how bread dough rises|how soap removes grease|why metal rusts
how a magnet attracts iron|how an aeroplane stays in the air|how a refrigerator keeps food cold|how a microwave heats food
how vaccines train the immune system|why we dream|how the heart pumps blood|why we get goosebumps|how memory works
how the eye sees colour|why the Moon has phases|what a black hole is|how stars are born|why Saturn has rings
what causes the northern lights|how coral reefs grow|how glaciers shape valleys|why deserts are cold at night|how fossils form
how sound travels|why echoes happen|how a battery stores energy|how solar panels make electricity|how a wind turbine works
what inflation is|how interest rates affect prices|why countries trade|how elections work|what a constitution does
how paper is recycled|how glass is made|how chocolate is made|how cheese is made|how a compass works
""".replace("|", "\n")
)

PEOPLE = lines(
    """
Marie Curie|Leonardo da Vinci|Ada Lovelace|Nelson Mandela|Cleopatra|Galileo Galilei|Isaac Newton|Charles Darwin
Florence Nightingale|Alexander the Great|Mahatma Gandhi|Wolfgang Amadeus Mozart|Frida Kahlo|William Shakespeare
Rosa Parks|Albert Einstein|Jane Austen|Nikola Tesla|Johannes Gutenberg|Confucius|Amelia Earhart|Vincent van Gogh
Archimedes|Catherine the Great|Martin Luther King Jr.|Hypatia of Alexandria|Louis Pasteur|Simón Bolívar
""".replace("|", "\n")
)

HISTORY = lines(
    """
the fall of the Roman Empire|the invention of the printing press|the Industrial Revolution|the French Revolution
the building of the pyramids|the Silk Road|the Renaissance|the first landing on the Moon|the end of the Berlin Wall
the Black Death|the First World War|the discovery of penicillin|the voyages of the Vikings|the Great Depression
the invention of the telephone|the civil rights movement in the United States|the opening of the Suez Canal
the Meiji Restoration in Japan|the early days of the internet|the women's suffrage movement|the Ottoman Empire
the American Declaration of Independence|the Olympic Games in ancient Greece|the invention of the steam engine
""".replace("|", "\n")
)

COUNTRIES = (
    "France Japan Brazil Kenya Canada Egypt India Norway Peru Italy Australia Mexico Vietnam Spain Morocco Germany Turkey "
    "Argentina Greece Thailand Portugal Ireland Ethiopia Indonesia Poland Chile Nigeria Iceland Finland Switzerland"
).split()

ANIMALS = (
    "elephant|octopus|penguin|honeybee|owl|dolphin|polar bear|kangaroo|chameleon|giraffe|ant|salmon|wolf|hummingbird|crocodile"
    "|bat|hedgehog|camel|sea turtle|squirrel|blue whale|peacock|beaver|jellyfish|fox"
).split("|")

PAIRS = records("""
coffee|tea
cats|dogs
a violin|a guitar
city life|country life
reading on paper|reading on a screen
trains|aeroplanes
solar power|wind power
butter|olive oil
running|swimming
renting a flat|buying a flat
working from home|working in an office
electric cars|petrol cars
a laptop|a tablet
chess|checkers
a novel|a short story
alligators|crocodiles
weather|climate
a virus|a bacterium
frogs|toads
a comet|an asteroid
a debit card|a credit card
rice|pasta
a democracy|a monarchy
moths|butterflies
a simile|a metaphor
summer holidays|winter holidays
public transport|driving
yoga|weight training
fresh vegetables|frozen vegetables
a village|a town
stocks|bonds
a biography|an autobiography
jam|marmalade
camping|staying in a hotel
online courses|evening classes
oil paint|watercolour
a symphony|a concerto
rabbits|hares
""")

# Pairs of PAIRS that nobody has to choose between.
NO_CHOICE = "alligators|weather|a virus|frogs|a comet|a democracy|moths|a simile|a biography|a symphony|rabbits".split("|")

PROBLEMS = lines("""
I keep putting off my homework until the last evening.
I find it hard to fall asleep on Sunday nights.
My neighbour plays loud music late at night.
I am nervous about speaking in front of my class.
I want to save money but always spend it by the end of the month.
My houseplants keep dying.
I have a job interview next week and do not know how to prepare.
I moved to a new city and know nobody there.
I forget people's names right after meeting them.
My room is always untidy.
I look at my phone too much.
I want to learn a language but have only 15 minutes a day.
My dog barks whenever the doorbell rings.
I would like to eat less sugar.
My friend has not answered my messages for two weeks.
I get headaches from working at a screen.
I have to tell my boss that I will miss a deadline.
I want to start running but I am out of breath after two minutes.
My bread always turns out too dense.
I argue with my brother about the dishes.
I feel tired every afternoon.
My bicycle was stolen and I need to get to work.
I have been invited to a dinner and cannot think of a gift.
My child does not like vegetables.
I have too many photos on my computer.
I lose concentration when I read long texts.
My team meetings always take too long.
I burned the bottom of my favourite pot.
I would like to wake up earlier.
I am worried about moving in with a flatmate.
My handwriting is hard to read.
I cannot decide between two job offers.
I always pack too much for a trip.
My cat scratches the sofa.
I made a mistake at work and nobody has noticed yet.
""")

LISTS = lines(
    """
ways to save water at home|healthy snacks for a long journey|ideas for a rainy afternoon with children|small gifts for a teacher
uses for old newspapers|questions to ask before adopting a dog|things to check before buying a used bicycle|cheap dinners for students
vegetables that are easy to grow on a balcony|games that need only paper and a pencil|habits that help with studying
ideas for a first date|things to pack for a weekend at the sea|ways to greet someone politely|topics for small talk
reasons to visit a museum|exercises that need no equipment|ways to reduce waste in a kitchen|things every first-aid kit should hold
spices that are good to keep at home|ideas for a class project about the weather|signs that a website is not trustworthy
jobs that involve working with animals|inventions that changed daily life|musical instruments with strings
rules for a friendly debate|tips for taking better photos with a phone|ideas for a birthday party for a ten-year-old
ways to thank a colleague|things to do on a long train ride|safety rules for a campfire|book genres and what marks each of them
mistakes people make when painting a room|ways to learn new words|ideas for a neighbourhood festival
""".replace("|", "\n")
)

HOWTO = lines(
    """
boil an egg|change a bicycle tyre|make a paper aeroplane|write a thank-you note|tie a tie|clean a window without streaks
plan a weekly menu|repot a plant|remove a coffee stain from a shirt|prepare for an exam in one week|make vegetable soup
pack a suitcase|start a vegetable garden|read a map|learn to juggle|brew good tea|write a short speech for a wedding
calm down before an exam|sharpen a kitchen knife|organise a book club|fold a fitted sheet|make a simple budget|iron a shirt
build a birdhouse|clean a keyboard|introduce two friends|set up a quiet place to study|make pizza dough|care for leather shoes
write a complaint to a shop|keep a diary|choose a ripe melon|sew on a button|plan a day trip with children|make a snow shelter
""".replace("|", "\n")
)

WORDS = lines(
    """
empathy|irony|entropy|democracy|photosynthesis|nostalgia|gravity|inflation|biodiversity|ecosystem|hypothesis|perspective
resilience|metabolism|tradition|algorithm|evolution|friction|harmony|migration|monopoly|symmetry|osmosis|sustainability
curiosity|justice|paradox|rhythm|habitat|supply and demand
""".replace("|", "\n")
)

FACTS = lines("""
What is the capital of Canada, and what is the city known for?
How many bones does an adult human have?
Which planet is the largest in the solar system?
What are the primary colours?
Who wrote the play Romeo and Juliet?
What is the longest river in Africa?
Which gas do we need to breathe, and how much of the air is it?
What languages are spoken in Switzerland?
How long does the Earth take to travel around the Sun?
What is the chemical formula of water, and what does it mean?
Which ocean is the deepest?
What are the five senses?
Which metal is liquid at room temperature?
What is the difference between a continent and a country?
How many players are on a football team?
What is the highest mountain in the world?
Who painted the Mona Lisa?
What do herbivores, carnivores and omnivores eat?
Which instruments belong to a string quartet?
What are the three states of matter?
Which country has the most people?
What is the smallest prime number?
What does the heart do?
Why is Pluto no longer called a planet?
What currency is used in Japan?
Which vitamins are in oranges?
How many continents are there, and what are their names?
What is the main ingredient of glass?
What is a group of lions called?
In which direction does the Sun rise?
What is the largest desert on Earth?
How many minutes are there in a day?
What are the main parts of a plant?
Which sea lies between Europe and Africa?
What is the freezing point of water in Celsius and Fahrenheit?
Who was the first person to walk on the Moon?
What kind of animal is a whale?
What are the main ingredients of bread?
Which blood vessels carry blood away from the heart?
What is the Great Barrier Reef?
""")

JOBS = lines(
    """
nurse|carpenter|librarian|pilot|veterinarian|baker|journalist|firefighter|architect|gardener|translator|electrician|judge
marine biologist|primary school teacher|software tester|chef|photographer|postal worker|archaeologist|pharmacist|tailor
""".replace("|", "\n")
)

HOBBIES = lines(
    """
bird watching|knitting|chess|rock climbing|baking bread|astronomy|playing the ukulele|pottery|gardening|calligraphy|hiking
photography|origami|sailing|collecting stamps|woodworking|cooking Indian food|dancing tango|learning Spanish|table tennis
""".replace("|", "\n")
)

EMAILS = lines(
    """
ask a landlord to repair a dripping tap|thank a teacher for writing a recommendation|invite colleagues to a farewell lunch
cancel a dentist's appointment|ask a library to extend a loan|apologise to a customer for a late delivery
ask a professor for a meeting|tell a team about a new schedule|decline an invitation politely|ask a hotel about a late arrival
remind a friend about a borrowed book|congratulate a cousin on a new baby|ask for a day off|report a broken street lamp
offer help to a new neighbour|request a refund for a damaged lamp|ask a company about summer jobs
tell parents about a school trip|confirm a reservation for eight people|recommend a former colleague
""".replace("|", "\n")
)

STORIES = lines(
    """
a lighthouse keeper who finds a message in a bottle|a robot that wants to learn to paint|two rivals who get stuck in a lift
a girl who can talk to crows|a baker whose bread makes people tell the truth|an old map found in a library book
a snowman who is afraid of winter|a taxi driver and a passenger without a destination|a clock that runs backwards
a boy who plants a coin|a dragon who runs a teahouse|the last bookshop in a city|a lost dog on a night train
a scientist who discovers a new colour|a town where it never stops raining|a violin that plays by itself
a grandmother who learns to surf|a secret garden on a roof|a knight who has lost his horse|the first letter from Mars
""".replace("|", "\n")
)

POEMS = lines(
    """
the sea at night|a rainy Monday|an old bicycle|the first snow|a sleepy cat|autumn leaves|the smell of bread|a long journey
friendship|a busy railway station|the moon|a forgotten toy|spring in the city|a quiet library|a garden after rain|home
""".replace("|", "\n")
)

OPINIONS = lines(
    """
children should have homework in primary school|cities should ban cars from their centres|everyone should learn to cook
school days should start later|zoos are still needed|people should work four days a week|museums should be free
everyone should learn a second language|paper books will disappear|sport is more fun to play than to watch
it is better to live near the sea than in the mountains|phones should be banned in classrooms|tourism helps small towns
homes should be smaller|handwriting is still worth learning|people should eat less meat|competition makes people better
""".replace("|", "\n")
)

PLANS = lines(
    """
a weekend in a small town by a lake|a week of vegetarian dinners|a first month of learning the piano|a picnic for ten people
a study week before a chemistry test|a morning routine of 30 minutes|a school science fair|a visit by grandparents
a beginner's workout for three days a week|moving to a new flat|a garden from March to October|a family reunion
a quiet Sunday|a small book sale for charity|a two-hour walk through an old town|a job search of six weeks
""".replace("|", "\n")
)

QUIZZES = lines(
    """
the solar system|European capitals|the human body|famous inventions|ancient Egypt|oceans|fruit and vegetables|classical music
dinosaurs|world rivers|the weather|space travel|insects|the Olympic Games|languages|bridges and towers
""".replace("|", "\n")
)

IDIOMS = lines(
    """
break the ice|a piece of cake|once in a blue moon|to spill the beans|under the weather|to bite the bullet|a blessing in disguise
to hit the nail on the head|the ball is in your court|to let the cat out of the bag|to burn the midnight oil|a drop in the ocean
to cut corners|to sit on the fence|to pull someone's leg|better late than never|to kill two birds with one stone|to call it a day
""".replace("|", "\n")
)

FOODS = lines(
    """
sushi|falafel|risotto|goulash|tacos|hummus|paella|kimchi|ramen|pierogi|curry|tiramisu|gazpacho|dim sum|baklava|couscous|ceviche
""".replace("|", "\n")
)

ROLES = records("""
a patient museum guide|Tell me about the bronze sword in front of us.
a friendly waiter|I cannot eat nuts. What do you suggest?
a strict but fair coach|I missed training twice this week.
a travel agent|I have five days and like mountains.
a librarian|I want a novel that is not too long.
a pirate captain|Why are we sailing north?
a gardener|My tomatoes have yellow leaves.
a cheerful weather presenter|What will tomorrow be like on the coast?
a detective|Who could have taken the silver spoon?
a history teacher|Why did people build castles on hills?
a chef|I have eggs, potatoes and an onion.
an astronaut|What is breakfast like in orbit?
a mountain rescuer|What should I take on a day hike?
a medieval merchant|What are you selling today?
a doctor for toys|My teddy bear has lost an eye.
a time traveller from 1900|What surprises you most about our street?
""")

WHATIFS = lines(
    """
the Earth had two moons|people could read minds|it rained every day for a year|nobody needed sleep|animals could talk
the internet stopped for a week|trees grew overnight|money did not exist|humans could breathe under water|there were no mirrors
everyone lived to be 200|the days were 30 hours long|all cars could fly|music had never been invented|we could visit the past
""".replace("|", "\n")
)


EVERYDAY = lines("""
Should I keep tomatoes in the fridge?
Is it better to stretch before or after running?
How often should I water a cactus?
Can I use olive oil instead of butter in a cake?
What should I do if my phone falls into water?
How long can cooked rice be kept?
Is it rude to arrive early for a dinner party?
Why does my bread get mouldy so fast?
What is a fair way to split household chores among three people?
How do I know if an egg is still good?
What should I wear to a job interview at a small firm?
Do I need a visa or only a passport to travel abroad, and where can I check?
How can I tell whether a mushroom is safe to eat?
What is the best way to dry wet shoes?
How much sleep does a teenager need?
Which light is best for reading in bed?
What can I cook with chickpeas, spinach and rice?
How do I keep a cut avocado from turning brown?
What does it mean when a car's oil light comes on?
How should I answer when someone asks me about my weaknesses?
What can I do against mosquitoes on a balcony?
Are bananas good before sport?
How many books can one realistically read in a year?
What is the easiest pet for a busy person?
How do I stop my glasses from fogging up?
Which plants survive in a dark room?
How can I make instant noodles healthier?
What should be in a good out-of-office reply?
Is it safe to charge a phone overnight?
What is a good first sentence for a personal blog?
How do I politely leave a conversation at a party?
What do I say when I have forgotten an anniversary?
""")


def families() -> Families:
    """All chat training families by name."""
    return {
        "chat_phenomenon": once("phenomenon", ("Explain {0}.", "Can you tell me {0}?", "Explain to a ten-year-old {0}.", "In three or four sentences, explain {0}."), PHENOMENA, 55),
        "chat_person": once("person", ("Who was {0}?", "Why is {0} remembered today?", "Write a short biography of {0}."), PEOPLE),
        "chat_person_lesson": once("lesson", ("What could a student learn from the life of {0}?", "Imagine an interview with {0}. Write two questions and answers."), PEOPLE, 24),
        "chat_history": crossed("history", ("Tell me about {0} and its consequences.", "Give a short overview of {0}.", "Name three effects of {0}."), HISTORY, 40),
        "chat_country": once("country", ("Tell me five interesting facts about {0}.", "What should a visitor know about the customs of {0}?", "Describe the geography of {0} in a short paragraph."), COUNTRIES),
        "chat_country_trip": once("trip", ("Which three places would you show a friend in {0}, and why?", "What is the weather in {0} like through the year?"), COUNTRIES, 25),
        "chat_country_food": once("food", ("What do people in {0} typically eat for breakfast and dinner?", "Describe a traditional festival in {0}."), COUNTRIES, 25),
        "chat_animal": once("animal", ("How does the {0} live, and what does it eat?", "What makes the {0} special among animals?", "Write a short encyclopedia entry about the {0}."), ANIMALS),
        "chat_animal_voice": once("voice", ("Describe a day in the life of a young {0} from its own point of view.", "Give me four surprising facts about the {0}."), ANIMALS, 22),
        "chat_compare": once("compare", ("What is the difference between {0} and {1}?", "Compare {0} and {1} in a short table.", "What speaks for {0}, and what speaks for {1}?", "Give two similarities and two differences between {0} and {1}."), PAIRS),
        "chat_choose": once("choose", ("Help me choose between {0} and {1}. What questions should I ask myself?",), [pair for pair in PAIRS if pair[0] not in NO_CHOICE], 22),
        "chat_advice": crossed("advice", ("{0} What can I do?", "{0} Do you have any advice?", "{0} Give me three practical tips."), PROBLEMS, 55),
        "chat_list": crossed("list", ("List seven {0}.", "Give me five {0}, each with one sentence.", "What are some {0}?"), LISTS, 50),
        "chat_howto": crossed("howto", ("How do I {0}?", "Give me step-by-step instructions to {0}.", "What do I need to know to {0}?"), HOWTO, 50),
        "chat_word": crossed("word", ("What does the term \"{0}\" mean? Give two example sentences.", "Define {0} in simple words.", "Explain \"{0}\" with an example from daily life."), WORDS, 42),
        "chat_fact": once("fact", ("{0}",), FACTS),
        "chat_job": once("job", ("What does a {0} do all day?", "What skills does a good {0} need?", "Write a short job advertisement for a {0}."), [job for job in JOBS if job[0] not in "aeiou"]),
        "chat_hobby": once("hobby", ("I would like to try {0}. How do I start?", "Why do people enjoy {0}?", "What equipment does a beginner need for {0}?"), HOBBIES),
        "chat_email": once("email", ("Write a short e-mail to {0}.", "Help me write a polite message to {0}."), EMAILS),
        "chat_story": once("story", ("Write a short story about {0}.", "Write the opening paragraph of a story about {0}."), STORIES),
        "chat_poem": once("poem", ("Write a short poem about {0}.", "Write four rhyming lines about {0}."), POEMS),
        "chat_opinion": once("opinion", ("Some people say that {0}. Give two arguments for and two against.", "Write a short paragraph arguing that {0}."), OPINIONS),
        "chat_plan": once("plan", ("Make a plan for {0}.", "Help me plan {0} with a simple checklist."), PLANS),
        "chat_quiz": once("quiz", ("Write four quiz questions with answers about {0}.", "Make a multiple-choice question about {0} and explain the answer."), QUIZZES),
        "chat_idiom": once("idiom", ("What does the expression \"{0}\" mean?", "Use the expression \"{0}\" in a short dialogue."), IDIOMS),
        "chat_dish": once("dish", ("What is {0}, and where does it come from?", "How is {0} made at home?"), FOODS),
        "chat_everyday": once("everyday", ("{0}",), EVERYDAY),
        "chat_role": once("role", ("Answer as {0}: {1}", "Play {0}. I say: \"{1}\""), ROLES),
        "chat_whatif": once("whatif", ("What would change if {0}?", "Imagine that {0}. Describe one ordinary morning."), WHATIFS),
    }  # fmt: skip
