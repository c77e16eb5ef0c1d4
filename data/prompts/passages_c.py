"""Scenes of the rewrite training prompts, third part: stories, instructions, people, opinions. See `passages.py`."""

TEXT = """
# story train *
{name} got on the last train to {town} with a bag full of letters that had never been sent. || On the way home from work {name} fell asleep on the train and woke up only at the last stop.
The carriage was empty except for an old woman who was knitting something very long and very red. || There was nobody on the platform but a man in a yellow coat, who was feeding sparrows in the dark.
"You are late," she said, or perhaps it was the wind at the window. || A clock struck thirteen, and the lights in the waiting room went out one after another.
{name} wanted to laugh, but then remembered the dream of the night before. || {name} thought of the keys on the kitchen table at home and shivered.
When the doors finally opened again, the street outside smelled of salt and oranges. || Then a whistle blew somewhere, and everything began to move backwards.
# story attic *
While clearing out the attic, {name} found a tin box with a rusty lock. || On the day of the storm {name} climbed up to the attic to look for a bucket.
Inside the wall something was ticking, slowly and not quite regularly. || Behind a stack of chairs stood a door that had never been there before.
{name} called for {other}, who came up the ladder with a torch and a piece of cake. || Downstairs {other} was singing in the kitchen and did not hear a thing.
It took them a while to gather enough courage. || For a moment the rain stopped, as if it wanted to listen as well.
What they found was a small garden under glass, with lemons as big as fists. || And there, neatly folded, lay the blue coat that had been missing since the summer when {name} was nine.
# story market *
{name} sold apples at the market in {town}, and business had never been worse. || Every {day} {name} put up a stall at the market and sold clocks that did not work.
One morning a boy came and asked for the smallest one, not to eat but to keep. || A lady in a green hat stopped, looked at everything and asked what it would cost to buy the whole stall.
{name} named a price that was much too high, just for fun. || {name} gave it away for nothing, because there was something sad in that voice.
The next day a queue reached as far as the fountain. || By the evening the whole town was talking about it.
Nobody ever learned what had really happened, and {name} never told. || Years later a parcel arrived, with a seed inside and a note that said only: thank you.
# story boat *
The boat was called Patience, and {name} had painted it {a} times without ever going out to sea. || For {a} summers {name} and {other} had been building a boat in the garden, far away from any water.
Then the flood came, and in a single night the river stood at the gate. || One day the village teacher asked whether it would float at all.
The neighbours, who had always made jokes, now stood on their roofs and waved. || Children came running with flags, and someone brought a trumpet.
{name} untied the rope with shaking hands. || {name} looked at the sky, took a deep breath and pushed off.
It leaked, it leaned to one side, but it carried them. || From then on nobody laughed when {name} had an idea.
# story school
On the first day at the new school {name} could not find room {b}. || {name} had prepared the talk about volcanoes for weeks, and now all the notes were gone.
In the corridor stood a boy who was obviously lost as well. || The teacher looked up and smiled, which made it even worse.
They decided to try every door on the floor. || "Just tell us what you like about it," whispered {other} from the second row.
Behind the third one a whole orchestra was playing, and nobody asked any questions. || So {name} began to talk, at first far too fast and then with growing pleasure.
At noon they were sitting on the stairs and sharing a sandwich like old friends. || When the bell rang, the class clapped, and the notes turned out to be in the left shoe.
# story diary *
Today it rained so hard that we could not leave the tent before noon. || We got up at five in order to see the sun rise above the lake.
{name} cooked porridge over the gas burner and dropped the spoon in the mud. || {name} had forgotten the map, so we simply followed the stream.
In the afternoon we met a shepherd with {b} sheep, who showed us a short cut across the pass. || After {a} hours we reached a hut, where an old couple gave us soup and let us dry our socks.
My feet hurt, but the view over the valley made up for everything. || I have never been so tired and so happy at once.
Tomorrow we want to get to {town}, if the weather holds. || Tomorrow is a day of rest, and I am going to do nothing but read.
# steps seedlings
To grow tomatoes from seed, fill small pots with loose soil and press two seeds into each, about as deep as a fingernail is wide. || To take cuttings from a geranium, cut off a healthy shoot as long as your finger, just below a leaf.
Water them gently and cover the pots with glass or foil. || Remove the lower leaves and all the buds, and let the cut dry for a few hours.
Put them in a warm, bright place, and air them every day. || Then push the shoot into sandy soil and keep it slightly damp.
When the first real leaves appear, move each plant into a bigger pot. || After {a} weeks, roots will have formed, which you notice when new leaves appear.
After the last frost they may go outside, but get them used to the sun step by step. || Put the young plants into larger pots, and do not feed them before spring.
# steps bike
If your bicycle chain has come off, first shift to the smallest gear, so that the chain is loose. || If your bicycle brake squeaks, first check whether the rim is dirty or oily.
Push the rear derailleur forward with one hand. || Clean it with a cloth and a little alcohol, and rub the brake pads with sandpaper.
With the other hand lay the chain onto the lower teeth of the front ring. || Then look at the pads from above: the front end should touch the rim a little earlier than the back.
Turn the pedal slowly backwards until the chain runs by itself. || Loosen the screw, turn the pad slightly and tighten it again.
Finally clean your hands and check whether all gears work. || If it still squeaks after that, the pads are worn and have to be replaced.
# steps soup
Peel {a} potatoes and two carrots and cut them into cubes. || Wash a large bunch of spinach and chop {a} spring onions.
Fry an onion in a little butter until it is soft, then add the vegetables. || Toast a handful of pine nuts in a dry pan and set them aside.
Pour in a litre of stock and let everything simmer for twenty minutes. || Cook the pasta in plenty of salted water, and keep a cup of the water.
Blend half of the soup and stir it back in, so that it turns creamy. || Let the spinach collapse in hot oil, then mix it with the pasta, some of the water and a spoon of soft cheese.
Season with pepper and nutmeg, and serve it with dark bread. || Scatter the nuts on top and add lemon juice to taste.
# steps password
If you have forgotten your password, open the login page and click on the link below the field. || To set up the new printer, take it out of the box and remove all orange strips.
Type in the address with which you signed up. || Plug it in, press the power button and wait until the light stops flashing.
Within a few minutes you will get a message with a code of six digits. || Choose your language on the small screen and then the name of your wireless network.
Enter the code, and then choose a new password of at least twelve characters. || Put in the ink and a stack of paper, and print the test page.
You will be logged out on all other devices. || Finally install the app on your computer, which will find the printer by itself.
If no message arrives, look in the folder for unwanted mail. || If the print is pale, start the cleaning program from the menu.
# steps museum
Welcome to the audio tour. Please begin in the entrance hall and press the green button. || Before you leave the cabin, please take a few minutes to tidy up.
Hold the device to your ear like a telephone. || Wash and dry all dishes, and put them back into the cupboards.
Next to each painting you will find a number, which you type in to hear the story behind it. || Empty the fridge, take the rubbish to the bins at the car park and sweep the floor.
The tour takes about {b} minutes, but you can pause at any time. || Turn the heating down to frost protection, close all shutters and check that the stove is out.
Give the device back at the exit, where you will also get your deposit. || Lock the door twice and put the key into the box with the code {c}.
# person beekeeper
{woman} {last} became a beekeeper by accident, when a swarm settled in her chimney {b} years ago. || {man} {last} has been the night porter of the Grand Hotel in {town} for {b} years.
She had worked as an accountant and knew nothing about insects. || He knows which guests walk in their sleep and which ones call for ice at three in the morning.
An old farmer lent her a suit and showed her how to calm the bees with smoke. || Once he delivered a baby in the lift, and the child was named after him.
Today she looks after {b} hives on the roofs of {town} and gives courses for children. || Between two and five, when all is quiet, he writes crime novels by hand.
Her honey tastes of lime blossom, and she says that she has not been bored for a single day since. || He has finished {a} of them, and in every one the murderer is a tourist.
# person swimmer
{woman} {last} learned to swim at the age of {b}, after she had fallen off a ferry and been saved by a stranger. || {man} {last} grew up in {town} as the youngest of {a} children and left school early to work in a shipyard.
The fear stayed with her for a year, and then she signed up for a course. || In the evenings he drew the ships that he had welded by day.
At first she could not even put her face into the water. || A teacher saw the drawings by chance and sent {a} of them to a competition.
Now she swims {a} kilometres in the sea every {day}, even in {month}. || He won, and with the prize he paid for a year at the art school.
She has never found the stranger, but she has trained as a lifeguard. || Today his pictures of harbours hang in museums, yet he still keeps his old helmet on the shelf.
# person inventor
As a child {man} {last} took apart every radio in the house. || {woman} {last} drives the school bus of {town} and knows all of her {b} passengers by name.
At fifteen he built a machine that sorted his mother's buttons by size. || On birthdays there is a balloon on the right seat, and in {month} the whole bus is decorated.
He later studied engineering, but dropped out when he had the idea of a cheap water filter. || She used to drive trucks across the continent, but she wanted to be home for dinner.
It consists of clay, sand and a little silver and costs less than {a} dollars. || When a new boy did not speak a word for weeks, she learned to say good morning in his language.
More than {c} villages use it now, and he has never taken out a patent. || Since then he sits in the first row and corrects her pronunciation.
# opinion homework
I think that our town should turn the old car park behind the church into a garden. || In my view, shops should not be open on Sundays.
There are hardly any green places in the centre, and on hot days the square is like an oven. || People need one day on which the streets are quiet and families have time for each other.
A few trees, some benches and a pond would not cost much, and many neighbours have already offered help. || Those who work in shops have children and friends too, and often they cannot say no to a shift.
Some say that customers will stay away if they cannot park. || Of course it is convenient to buy milk at any hour, but we managed without that for a long time.
But the parking garage at the station is half empty and only five minutes away. || Petrol stations and bakeries may stay open for emergencies, and everything else can wait until Monday.
# opinion phones
Our school wants to forbid phones even during breaks, and I believe that this is a mistake. || Our school finally wants to forbid phones during breaks, and I am very much in favour of it.
Many of us use them to check the bus, to listen to music or to send a message home. || Last year the yard was silent, since everyone stared at a screen.
Those who stare at the screen all day will not become social just because of a rule. || In the test week, when phones had to stay in the lockers, pupils suddenly played cards and talked.
It would be better to agree on zones without phones, such as the cafeteria. || There were also fewer quarrels about photos that somebody had taken in secret.
We have to learn to use these devices sensibly, and where else should that happen? || Anyone who has to reach their parents can use the telephone in the office, as we did before.
# talk plants
{name}: Have you watered the plants while I was away? || {name}: Are you coming to the rehearsal on {day}?
{other}: Yes, every day, just as you told me. || {other}: I would love to, but my shift does not end before seven.
{name}: Every day? I said every {day}. The cactus is swimming. || {name}: That is a pity, because we are going to choose the songs for the concert.
{other}: Oh. I was wondering why it looked so sad. || {other}: Could you vote for me? I want the one about the river and nothing too high.
{name}: Never mind, let us put it in the sun and hope for the best. || {name}: I will, but then you bring the cake, and {a} of us are always hungry.
{other}: And I will buy you a new one, a plastic one perhaps. || {other}: Deal. Chocolate, as always, and I will be there by eight.
# talk ticket
Customer: Good morning, I bought a ticket to {town} yesterday, but now I have to travel on {day}. || Caller: Hello, my internet has been down since {day}, and I work from home.
Clerk: Let me see. It is a saver ticket, so it can be changed only for a fee of {a} dollars. || Support: I am sorry to hear that. Which lights are on at your router?
Customer: That is fine. Is there still a seat by the window? || Caller: Only the red one, and it blinks about once a second.
Clerk: There is one in carriage {a}, in the quiet zone. || Support: Then the line itself is broken. A technician can come tomorrow between nine and twelve.
Customer: Perfect. Does the train have a restaurant? || Caller: Tomorrow I have to be in the office. Would the day after work as well?
Clerk: Unfortunately not, but there is a trolley with drinks and sandwiches. || Support: Yes, at two o'clock. I will send you a confirmation and take {b} dollars off your bill.
# report garden
This spring the school garden was looked after by {b} pupils from three classes. || Our club planted {c} young trees on the hill above {town} this spring.
Because of the dry weather in {month}, about a third of the plants died. || Deer ate the tips of many plants, although we had put up a fence.
We therefore collected rain water in old barrels and covered the soil with straw. || With donations of 1,400 dollars we bought better protection and a small pump.
The most successful crops were beans and pumpkins, of which we harvested {b} kilograms. || The hazels and the cherries have done best, and some of them are already as tall as a child.
Next year we would like to build a greenhouse, for which we still need help. || Next year we plan to start a month earlier and to invite the neighbours to join in.
# report survey
In {month} we asked {c} customers of the town library how satisfied they were. || Between {month} and the end of the year we counted how people came to our office building.
{b} percent said that they come at least once a week. || On dry days about {b} percent used a bicycle, and on rainy days only half as many.
Most of the criticism concerned the opening hours and the old chairs. || Many complained that there are too few covered places for bikes.
Younger people in particular would like to have quiet rooms in which they can study in groups. || Those who live more than ten kilometres away almost always take the car.
We suggest a test with longer hours on {day} evenings. || We propose to turn {a} parking spaces into a shelter with a roof and sockets.

# mail thanks
Dear {name}, now that the dust has settled I want to thank you for your help with the move. || Dear {name}, what a surprise it was to find your parcel on the doorstep this morning!
Without you we would still be standing on the stairs with the piano. || I had told nobody that the last weeks had been hard, but you seem to notice such things.
The children have already claimed the room with the round window, and {other} has planted herbs on the sill. || The jam is half gone, the book is on my bedside table, and {other} is wearing the ridiculous hat.
There is a bed for you whenever you come through {town}. || I hope to return the favour one day, so just call if you need anything.
How about dinner on {day}, with real plates this time? || If you have time on {day}, come by for coffee, and bring the dog. Yours, Kim
# notice lost
Who has seen our cat? He has been missing since {day} and answers to the name of Pepper. || Lost on {day} between the station and Park Street: a black case with a clarinet inside.
He is grey with one white paw and a notch in his left ear. || It has a scratch on the lid and a sticker with a whale.
It is not worth much to anyone else, but in our family everybody is heartbroken. || My daughter cannot sleep, and next week there is a concert in which something would be missing.
Please look in cellars and sheds, and under hedges as well. || Perhaps somebody has taken it in, or him, without knowing where to turn.
A reward of {b} dollars and a home-made cake await the finder. || Anyone who knows something can ring {name} at 555-0{c}, day or night.
# opinion trains *
Night trains ought to be brought back, and not only for people with a fear of flying. || I used to fly everywhere, but since last {month} I have travelled only by train.
You get on after dinner, read a little and wake up {c} kilometres further on. || It takes longer, of course, yet the hours belong to you, and you can work, sleep or look out of the window.
There are no queues, no plastic bags for shampoo and no bus from an airport in the middle of nowhere. || Children may run around, and sooner or later somebody shares a bag of cherries.
What stands in the way is the price, because kerosene is hardly taxed, while trains pay for every metre of track. || The weak point is the connections: in {town} I missed the last train and spent {a} hours on a bench.
If that were changed, the beds would be full. || Even so, I would not go back.
# review tent *
We took this tent on a trip of {a} days along the coast, and it rained on every one of them. || I bought this tent for the garden, but then we used it for a whole week in the mountains.
Even beginners can put it up in ten minutes, since the poles are marked with colours. || The instructions are useless, but after the third try everything went smoothly.
It stayed dry inside, although the wind bent the poles alarmingly. || The floor is thin, so you should lay something underneath on stony ground.
Three people fit in if they like each other; for two it is comfortable. || What I missed were pockets and a hook for a lamp.
For {c} dollars you can hardly go wrong. || I would buy it again, perhaps in a colour other than orange.
"""
