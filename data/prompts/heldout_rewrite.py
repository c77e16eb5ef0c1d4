"""Held-out prompts of the domain rewrite: own passages and own wordings."""

from .families import Families, blocks

PASSAGES = blocks("""
On Thursday our ferry could not dock because of the fog, so we circled outside the harbour for almost two hours. The captain handed out biscuits and told stories about smugglers until even the children forgot to complain. When the fog lifted at last, a dozen seals were lying on the pier as though they had been waiting for us.
---
To the housing office: the light in the stairwell of number 14 has been out since Easter, and last night my mother tripped on the third step. I have reported it by telephone twice. Should nothing happen within a week, I will have to ask a lawyer for advice. Sincerely, Gabriel Ortega
---
Lace was once made by hand with dozens of small wooden bobbins. A pattern drawn on parchment was pinned to a pillow, and threads were crossed and twisted around the pins. A collar could take half a year. Machines ended the trade in the nineteenth century, but a few clubs keep the skill alive and meet on winter evenings.
---
The power station on the Vell river will be shut down for inspection in the first half of September. Divers are going to examine the gates and remove branches that have collected over the summer. Canoeists should expect a stronger current below the weir. Anglers may use the eastern bank as usual.
---
My first impression of the vacuum cleaner was good: it is light, it turns on a coin and it swallows dog hair without trouble. Then the cable turned out to be so short that I have to change sockets in each room. The dust container is tiny too. For a studio flat it may be perfect; for a house I would look elsewhere.
---
Polar explorers of a century ago ate pemmican, a mixture of dried meat and fat. It hardly ever spoiled, weighed little and gave a great deal of energy. They boiled it with melted snow and crushed biscuits into a thick stew called hoosh. Nobody praised its taste, but on cold nights it was awaited with longing.
---
Old Bartholomew wound up the town hall clock each evening, as his father had done. One evening he stayed in bed with a fever, and the clock stopped at ten to eight. Next morning the shops did not open, the buses waited, and the whole town sat at breakfast, delighted, until he felt better.
---
Minutes of the allotment society, 4 June: The treasurer announced a surplus of 312 dollars. Mrs Abara proposed a second tap near plots 20 to 35, which was accepted with one vote against. The dispute about the height of hedges was postponed. Mr Lind will order gravel. Tea was served by plot 9.
---
Moss has no roots. It drinks with its leaves and can dry out until it crumbles, then turn green within minutes of a shower. Some kinds survive for centuries inside glaciers. In Japan, monks tend gardens in which moss covers everything like velvet, and they pluck out fallen needles with tweezers.
---
Good evening, Ms Feld. I am afraid that we cannot offer you the flat on Quarry Lane. The owner has decided to give it to a nurse who starts at the clinic next month. However, a similar one on the second floor will become vacant in October. Shall I put your name on the list? Regards, Tim Brandt
---
When the circus moved on, one camel stayed. It stood between the goalposts of the football field and chewed. The club postponed its match, then a second one, and in the end appointed the animal as its mascot. Attendance has tripled since. The circus has written once, asking for a photograph.
---
Before you hang wallpaper, turn off the electricity and unscrew the covers of the sockets. Fill holes, sand the wall and brush on primer. Draw a vertical line with a plumb bob, since corners are rarely straight. Start there, smooth each strip from the centre outwards, and trim it at the skirting board with a sharp blade.
---
Shortly after dawn a delivery drone landed by mistake on the balcony of retired judge Agnes Whitlock. It carried insulin for a farm twelve miles further on. The judge telephoned the hospital, put on her boots and drove the parcel there herself. The operator blames a faulty altitude sensor.
---
Coral looks like a plant but is a colony of animals. Each polyp is smaller than a pea and builds itself a cup of limestone. Algae in its tissue supply sugar and the bright tints. When the sea becomes too hot, the polyps expel the algae and turn white, and unless it cools down soon they starve.
---
Dear Grandpa, camp is great except for the porridge. Yesterday we paddled to an island and I spotted an otter before anybody else did. My tent mate snores like your tractor. Could you please post my blue sweater and some stamps? The counsellor says that I tie the best knots. Hugs, Winnie
---
The orchestra of Gellerton is looking for a second bassoon. Rehearsals are held on alternate Wednesdays in the fire house, and concerts in spring and Advent. Applicants should read fluently and own an instrument, though the repair of one can be subsidised. An audition consists of one slow piece and sight-reading.
---
Sand is becoming scarce, strange as it sounds. Desert grains have been rounded by wind and do not lock together in mortar, so builders dredge rivers and beaches. Whole islands have vanished in this way. Recycled rubble and crushed rock could replace part of it, but they cost more.
---
For thirty-one years Dolores Pine repaired umbrellas in a shop hardly wider than its door. She charged by the rib. Film stars and fishwives sat on the same stool and waited. After she retired, the city placed a bronze umbrella on the kerb, and on wet days somebody always hangs a real one beside it.
---
I do not believe that our museum should charge admission. Those who can afford it would pay without noticing, yet the teenagers who now drop in after class would stay outside. Donations have covered the heating so far. If money is short, let us rent out the hall for weddings rather than shut out the curious.
---
Mira: The oven says error seven. Jules: Did you check the manual? Mira: It says to call an engineer. Jules: Or we could eat salad. Mira: Eleven guests are coming, and I promised lasagne. Jules: Then I will ask Mrs Obi upstairs. Her oven is huge, and she likes lasagne.
---
Shepherds in the Canary Islands once talked to each other by whistling across deep ravines. The whistles imitate the melody of Spanish words and carry for up to three miles. When telephones came, the language nearly vanished. Since 1999 it has been a subject in the schools of La Gomera, and pupils love it.
---
Results of the canteen trial: during six weeks with a smaller default plate, leftovers fell by 27 percent, whereas the number of second helpings went up by only 4 percent. Staff noted shorter queues. Two diners objected in writing. The committee recommends that the plates be kept and the old ones be donated.
---
A kettle boiled over in the observatory, and the steam set off the alarm. While the astronomers stood outside in their slippers, the clouds parted for the first time in a fortnight. One of them looked up without any instrument and saw a new star in the Swan. It is now officially named after the kettle.
---
Notice to swimmers: blue jellyfish have drifted into the western cove. Their sting burns but is seldom dangerous. Rinse the skin with sea water, never with fresh water, and scrape off what sticks with a card. Lifeguards keep vinegar in the hut. The yellow flag will fly until the current changes.
---
Leather is tanned so that it does not rot. Traditionally hides were soaked for months in pits with oak bark, and the smell was so bad that tanners had to live outside the walls. Chromium salts have cut the process to a day. New materials made from mushrooms or pineapple leaves need neither.
---
The tram driver noticed that the same parcel had been riding with her all afternoon. On it was written: for whoever needs it. At the terminus she opened it and discovered gloves in five sizes, hand-knitted, all of them orange. She wears one pair. The other four went out again at once on line six.
---
We booked the sailing course in order to relax, which was naive. By Tuesday I had been hit by the boom twice and had learned eleven words for rope. The instructor, a cheerful woman of seventy, never raised her voice. On the last afternoon she let us cross the sound alone. I would pay double.
---
Fold the letter in thirds and seal it with wax as follows. Warm the stick above a flame without letting it drip or blacken. Dab a pool as wide as a coin on the flap, count to five, and press the cold stamp into it. Wait until it comes loose by itself. Practise on scrap paper first.
---
Council decides on night buses: from November onwards, lines 3 and 8 are going to run hourly until four on weekends. The vote was eleven to six. Opponents called the service a luxury, while supporters cited a petition by hospital staff. Fares stay the same, and a review is due after one winter.
---
Dear Mr Sorley, your manuscript made our whole office laugh, in particular the chapter with the geese. Nevertheless we publish only cookery books and cannot make use of it. May we send it to a colleague at a house for fiction? If you ever write down the recipe for that soup, please think of us. Yours, Ute Amsel
---
Frost flowers grow on young sea ice when the air is very cold and still. Vapour freezes onto tiny bumps and builds feathery crystals as tall as a thumb. They soak up brine and are saltier than the ocean itself. Bacteria live in them by the million. A breath of wind destroys a whole meadow.
---
Retired welder Cornelius Abt has built a railway in his orchard. The engine burns apple wood, pulls nine wagons and stops at three stations, one of which serves lemonade. Inspectors came last month, measured everything and rode four rounds. The permit arrived a day later, along with a request for a birthday booking.
---
It is a myth that chefs never measure. In pastry kitchens even water is put on the scales, since a few grams decide whether a cream sets. Cooks at the stove rely more on taste because they can correct a sauce until it is served. A cake cannot be corrected once the door is shut.
---
Our lodge bans drones from this season. Last August one of them frightened the chamois, and two kids fell from the ledge. Guests who wish to film may borrow a telescope with a phone holder free of charge. Devices left at reception are kept safe. We count on your understanding and on word of mouth.
---
The knight's armour in the hall was empty, everybody knew that. Still, at carnival somebody had put a carnation through its visor, and next day the flower was gone, and the day after there lay a neat rectangle of dust in the shape of a bow. The caretaker began to say good night to it.
---
Early photographers needed patience. A portrait took so long that sitters leaned on hidden iron stands in order not to move, and nobody smiled, because a smile cannot be held for half a minute. Children often turned out as a blur. Mothers sometimes sat under a cloth and held the baby still.
---
Subject: key cards. Colleagues, the new cards are valid from the fifteenth. Collect yours from Ingrid in the basement between one and three, and hand in the grey one. Without it the gate will not open after six in the evening. Contractors receive a green version that expires after ninety days.
---
Last orders at the Gull: after a hundred and ten years the harbour pub is changing hands. Two marine engineers are taking over and intend to alter nothing but the plumbing. The dartboard stays, as does the parrot. Only the clock that has always run fast may finally be set right, if regulars agree.
---
Terraces let farmers grow rice on steep hillsides. Each step is levelled and edged with a low wall of mud, and water trickles from the highest field to the lowest. Fish and ducks live among the stalks and eat pests. If a single family neglects its wall, all the neighbours below lose their water.
---
I borrowed a cello for a month in order to find out whether forty-six is too old to begin. My cat left the room, but the pensioner next door knocked and asked for more. By week three I could play a lullaby. I have now bought the instrument, a used one, with a dent like a smile.
---
The glass eel begins its life in the Sargasso Sea and drifts for two years towards Europe. It is transparent except for its eyes. In rivers it turns yellow and grows for a decade or longer. One autumn it becomes silver, stops eating and swims all the way back, and no one has ever watched it spawn.
---
Helpdesk record 8841: user states that the monitor flickers whenever the coffee grinder runs. Cable replaced, no change. Both appliances found on one extension lead behind the cupboard. Grinder moved to a separate outlet. Fault gone. User advised not to daisy-chain leads and offered us an excellent espresso.
""")

# family | wordings
FAMILIES = [
    ("gist", ("Boil this down to fifteen words or fewer:\n\n{0}", "What is the gist here? One line, please.\n\n{0}")),
    ("notes", ("Convert what follows into terse notes with dashes.\n\n{0}", "Jot down the essentials of this excerpt, each on a separate line.\n\n{0}")),
    ("radio", ("Recast the excerpt as the script of a radio presenter.\n\n{0}",)),
    ("elegant", ("Polish the style of the excerpt; keep its content.\n\n{0}", "Edit for clarity and flow:\n\n{0}")),
    ("learner", ("Adapt the excerpt for adults who have studied English for one year.\n\n{0}",)),
    ("stranger", ("A friend missed this. Tell her what it says.\n\n\"{0}\"",)),
    ("lookup", ("Read the excerpt and state which persons or things appear and what each of them does.\n\n{0}", "Pull out every quantity in the excerpt and say what it refers to.\n\n{0}")),
    ("telegram", ("Send the content as an old-fashioned telegram.\n\n{0}",)),
    ("cause", ("Name one cause and one effect mentioned in the excerpt.\n\n{0}",)),
    ("swap", ("Replace as many adjectives and verbs as you can by synonyms.\n\n{0}",)),
    ("caption", ("Someone wants to illustrate this. Describe the ideal picture and its caption.\n\n{0}",)),
]  # fmt: skip


def families() -> Families:
    """Held-out rewrite families by name; each passage is used twice or three times, each time in another family."""
    found: Families = {}
    position = 0
    for name, forms in FAMILIES:
        rows = []
        for row in range(9):
            rows.append(forms[row % len(forms)].format(PASSAGES[position % len(PASSAGES)]))
            position += 1
        found[f"rewrite_heldout_{name}"] = rows
    return found
