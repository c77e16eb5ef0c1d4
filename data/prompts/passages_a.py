"""Scenes of the rewrite training prompts, first part. See `passages.py` for the notation."""

TEXT = """
# mail library *
Dear members, the {town} library will be closed from {day} because the heating has to be replaced. || Hello everyone, please note that our library in {town} cannot open next week, as workers are putting in a new heating system.
You may keep all borrowed books until the end of {month}, and no late fees will be charged. || Loans that would have ended during this time are extended by {a} days without any action on your part.
The box for returns next to the side entrance stays open at all hours. || Books can still be dropped into the return box, which is emptied every morning.
Our reading group for children meets in the town hall instead, at the usual time. || If you have reserved a title, we will send it to the branch on Mill Street, where you can collect it with your card.
Thank you for your patience. {name} {last}, head librarian || We look forward to welcoming you in warm rooms again. With kind regards, {name} {last}

# mail delivery *
Hello, on {day} I ordered a standing desk from your shop, and it arrived this morning with a deep scratch across the top. || Good afternoon, the desk lamp from order {c} came yesterday, but the glass shade was broken when I opened the box.
The box itself was not damaged, so the fault must have happened before packing. || The driver simply left the parcel at the gate in the rain, although I was at home the whole day.
I have attached {a} photos and a copy of the invoice. || You will find pictures of the damage and my receipt attached to this message.
I would prefer a replacement, but a refund of part of the price would also be fine. || Please send me a new one or give me my money back by the end of {month}.
I have been a customer for {a} years and was always happy until now. {name} {last} || As I need it for work, I hope for a quick answer. Best wishes, {name} {last}

# mail meeting *
Hi team, thanks for joining the call today, here is what we agreed. || Hello all, a short note after this morning's meeting so that nothing gets lost.
{name} will finish the draft of the brochure by {day} and send it to {other} for proofreading. || {name} talks to the printer about prices and reports back on {day}, while {other} collects the missing photos.
We cut the budget for the stand to {c} dollars, since the hall is more expensive than expected. || The stand will be smaller than last year, because we have only {c} dollars left in the budget.
Nobody volunteered to take down the stand in the evening, so please tell me if you can stay. || We still need {a} people who can help to carry the boxes on the first day.
The next meeting takes place in room {b} at ten o'clock. || Let us meet again in a week, same time, same link.

# mail trip *
Dear parents, on {day} our class will visit the open-air museum near {town}. || Dear families, we are planning a trip to the wildlife park of {town} at the beginning of {month}.
The bus leaves the school yard at a quarter past eight and returns at about four in the afternoon. || We meet at the station at eight sharp, and the children will be back before half past three.
Please pack a lunch, a full bottle of water and a rain jacket. || Children need sturdy shoes, a snack and a hat against the sun, while phones stay at home.
Entry and bus together cost {a} dollars, which your child should bring in an envelope. || The costs of {b} dollars are paid by the friends of the school, so you do not have to send any money.
Two more adults are welcome to come along, so write to me if you are free. {name} {last} || If your child has an allergy, please let me know before the end of the week. Kind regards, {name} {last}

# mail job
Dear {name}, I am writing because of the summer job at your bicycle workshop that I saw on the notice board. || Dear {name} {last}, I would like to apply for the weekend position in your garden centre.
I am nineteen years old, study mechanics in {town} and have repaired bikes for friends since I was a child. || For the past {a} years I have helped at my aunt's farm, where I looked after the greenhouse and sold plants at the gate.
I can change tyres, adjust gears and talk to customers in two languages. || I know most common plants by name, and I do not mind heavy work or early hours.
I could start in {month} and work on up to four days a week. || From {month} on I am free on Saturdays and Sundays, and during the holidays on other days as well.
I would be glad to come by for a trial day. Yours, {other} || May I visit you on {day} to introduce myself? Best regards, {other}

# mail neighbour
Hi {name}, I hope you do not mind that I write instead of ringing the bell. || Dear {name}, I tried to reach you twice, but you were not in.
Since the weekend there has been water on the floor of my storage room, right below your bathroom. || For some days I have heard a loud knocking in the wall between our kitchens, mostly around midnight.
It is not much yet, but the boxes with my winter clothes are already wet. || It wakes the baby, and after that nobody in our flat can sleep for hours.
Could you check whether your washing machine or a pipe is leaking? || Maybe it comes from the pump of your aquarium or from the pipes behind the sink?
I am at home on {day} after six and could come up with a torch. Greetings, {other} || Just call me any time, and we can look at it together. Thanks, {other}

# mail invitation *
Dear friends, in {month} I turn {b}, and I want to celebrate it with all of you in the old boathouse. || Dear all, after {a} years abroad we are finally back in {town}, and we would like to see every one of you again.
The party starts on {day} at six with a barbecue, and {name}'s band plays from nine. || Come to our garden on {day} in the afternoon, when there will be coffee, far too much cake and a small treasure hunt for the children.
Please bring a salad or a dessert, but no presents. || You do not need to bring anything except a chair and a good story.
Those who come from far away can sleep in the attic, where there is room for {a} mattresses. || If it rains, we move everything into the barn next door.
Let me know by the first of the month whether you can make it. {other} || Please answer soon so that we can plan the food. Love, {other}

# notice water *
Residents of Harbour Street and Mill Lane will have no water on {day} between nine and two o'clock. || The water supply to all houses north of the river will be interrupted on {day} from seven in the morning until noon.
A valve from the year 19{b} has to be replaced before winter. || Workers need to connect the new school to the main pipe.
Please fill some bottles and buckets the evening before. || We recommend storing enough water for cooking and for flushing.
When the water returns it may look brown for a few minutes, which is harmless. || Afterwards, let the tap run for a while until the water is clear.
A tank truck will stand in front of the fire station for anyone in need. || Questions are answered by the city works of {town} under the number 555-0{c}.

# notice gym
The sports hall changes its opening hours from the first of {month}. || New rules apply in the swimming pool of {town} from next week.
On weekdays it opens at half past six, so that members can train before work. || The two outer lanes are reserved for slow swimmers, and the middle ones for training.
On {day} the hall stays closed to the public, because the club's teams need it for matches. || Every {day} evening belongs to the rescue swimmers, who practise there until nine.
Lockers have to be emptied every night, and anything left behind is taken to the front desk. || Please shower before you enter the water, and leave glass bottles outside.
A monthly card still costs {b} dollars, and students pay half. || The price of a single visit rises to {a} dollars, while cards for ten visits keep their price.

# notice market
The autumn market returns to the main square of {town} on the second weekend of {month}. || {town} invites everyone to its yearly plant swap in the yard of the primary school on {day}.
More than {b} stalls will sell cheese, honey, wool and pottery from the region. || Bring seeds, cuttings or young plants with a label, and take home as many as you have brought.
At noon {name} {last} shows how baskets are woven from willow branches. || {name} {last} from the botanical garden answers questions about sick leaves and poor soil.
Parking is scarce, but a free shuttle bus runs every {b} minutes from the football ground. || There is coffee and cake, and all income goes to the new playground.
Dogs are allowed on a lead. || In bad weather the event moves into the gym.

# notice phone
Visitors are asked to switch off their phones in the reading rooms. || Guests of the mountain hut are asked to follow a few simple rules.
Calls may be made in the hall on the ground floor, where there are also {a} sockets for charging. || Boots and wet jackets stay in the drying room, and the kitchen closes at eight.
Bags and coats must be left in the lockers, for which you need a coin. || Water is scarce up here, so showers are limited to {a} minutes.
Old manuscripts can be seen on {day} only, after signing in at the desk. || The lights go out at ten, because most hikers leave before sunrise.
Taking pictures without flash is permitted. || Please pay in cash before you leave, and carry your rubbish back down into the valley.

# news bridge
After {a} years of work the new footbridge in {town} was opened on {day}. || The town council of {town} has decided to repair its old iron bridge instead of replacing it.
It is {c} metres long and links the station with the university on the other bank. || Engineers had found rust in {b} places, but they believe the structure can last for another half century.
Until now students had to take a detour of half an hour. || During the repairs, which begin in {month}, cars have to use the road past the harbour.
The construction cost {a} million dollars, a little less than planned. || The costs are shared by the town and the state, since the bridge is a protected monument.
Mayor {name} {last} said at the ceremony that the bridge would bring the two halves of the town together. || Shop owner {name} {last} fears that customers will stay away during that time.

# news bears
Hikers near {town} saw a brown bear with {a} cubs on {day}, the first in the area for decades. || A wild beaver family has settled on the stream behind the hospital of {town}.
The animals were eating berries on a slope about {c} metres from the path. || In only {b} nights they felled more than a dozen trees and built a dam.
Forest ranger {name} {last} asks people to keep dogs on a lead and never to leave food behind. || Gardeners complain about flooded lawns, but biologist {name} {last} points out that frogs and kingfishers have come back.
Cameras will be set up along the trails to learn how many bears there are. || The town will put a pipe into the dam to keep the water at a safe level.
Farmers in the region have asked for help with fences. || A path with information boards is planned for {month}.

# news bakery
A fire destroyed the storage room of the bakery {last} in {town} in the night to {day}. || The oldest bakery in {town} closes in {month}, because nobody wants to take over the business.
Nobody was hurt, as the bakers had noticed the smoke early and called for help. || {name} {last} has stood in the shop for {b} years and has got up at two every morning.
The fire brigade needed {a} hours to put out the flames. || Several young bakers looked at the rooms, but the oven is old and the rent has doubled.
Neighbours offered their kitchens, so that bread could be baked the very next day. || Customers have written farewell notes and stuck them to the window.
The cause is not yet known, but an old cable is suspected. || The rye bread, at least, will survive, for the recipe has been given to the school kitchen.

# news library bus
A bus full of books now stops in {a} villages around {town} once a week. || The district of {town} has bought an electric bus that serves as a mobile health centre.
It carries about {c} novels, picture books and films, and more can be ordered. || On board there are an examination room, a small laboratory and a video link to the hospital.
Driver {woman} {last} used to work in a bookshop and knows what most of her readers like. || Nurse {name} {last} checks blood pressure, changes bandages and gives vaccinations.
Older people in particular are glad, since there has been no bus to the town on {day} for years. || For many residents the way to the next doctor is longer than {b} kilometres.
The project is paid for by a foundation and will run until the end of next year. || If the test goes well, a second vehicle will follow in {month}.

# review hotel
We spent {a} nights at the Hotel {last} in {town} and were pleased for the most part. || The guesthouse {last} in {town} looks lovely in pictures, but our stay there in {month} was a disappointment.
The room was spotless, with a wide view of the bay, and the bed was the best I have slept in for a long time. || Our room faced a loading yard, where trucks arrived from five in the morning.
Breakfast offered fresh fruit, eggs and home-made bread until eleven. || Breakfast consisted of toast, one kind of jam and weak coffee from a machine.
Less pleasant were the thin walls, through which we could hear every word from next door. || The young man at the front desk, however, was very kind and moved us to a quieter room after {a} days.
At {c} dollars a night I find the price fair, and we would come back outside the main season. || For {c} dollars a night I expect more, so I would not stay there again.

# review headphones
I have used these headphones every day for {a} months, mainly on the train. || I bought this coffee machine in {month} after my old one had died.
They shut out noise very well and stay comfortable even on long rides. || It heats up in less than a minute and makes a strong espresso with a fine layer of foam.
The battery lasts for about {b} hours, as the maker promises. || Cleaning is easy, because all parts can be rinsed under the tap.
What annoys me is the app, which forgets my settings again and again. || Unfortunately it is as loud as a lawn mower, and the water tank is enough for only {a} cups.
The case feels cheap as well. || The lid of the tank broke after three weeks, but the maker sent a new one free of charge.
Still, for {c} dollars I have not found anything better. || All in all I am satisfied, though I would not use it while others are asleep.

# review restaurant
The new noodle bar on {town} Road has only {a} tables, and on {day} we waited almost an hour for one. || On {day} we tried the vegetarian restaurant that {name} {last} has opened in the old mill.
It was worth it, for the broth was rich, the noodles were firm and the portions were huge. || The pumpkin dumplings were excellent, and the bread with herb butter alone would be a reason to return.
The dumplings, on the other hand, were lukewarm when they came. || The mushroom risotto tasted of nothing but salt, and we sent it back.
The waiters were friendly in spite of the crowd and explained every dish. || The service was slow, although we were the only guests until eight.
With drinks we paid {b} dollars for two, in cash, since cards are not accepted. || The bill for two came to {b} dollars, for which the risotto had been taken off without any discussion.

# review book
This novel tells of a family that runs a hotel by a lake over {a} generations. || In this slim book {name} {last} describes a walk of {c} kilometres along a forgotten railway line.
The first half is wonderful, full of odd guests, quarrels and secrets. || The author writes with humour about blisters, bad weather and people who offer soup to strangers.
After that the author seems to lose interest in her own characters. || The chapters about the history of the railway are long and full of dates.
Some threads are never tied up, and the ending comes out of nowhere. || A map would have helped, because I often did not know where we were.
Even so, I read all {c} pages within a week, and I will remember the grandmother for a long time. || Yet by the last page I had already looked up the train to {town}, which is the best praise I can give.
"""
