"""Tasks in other words, and other tasks in nearly the same words: what decontamination is measured with.

A task; the same with some words changed; the same said freely; another task, about the same things or
from the same template. Written by hand, over the kinds of tasks that agents are trained on.
"""
# ruff: noqa: E501

from __future__ import annotations

from typing import NamedTuple


class Reworded(NamedTuple):
    """One task and its neighbours."""

    task: str
    lightly: str
    freely: str
    other: str


TASKS = tuple(
    Reworded(*lines)
    for lines in [
        (
            "Book the cheapest flight from Oslo to Rome on 3 May for two adults.",
            "Please reserve the least expensive flight from Oslo to Rome on 3 May for two adults.",
            "Two of us, both adults, want to be in Rome on 3 May. We start in Oslo; take whatever plane costs least.",
            "Book the fastest flight from Oslo to Rome on 3 May for two adults.",
        ),
        (
            "Which customers in Berlin ordered more than 5 items in March?",
            "List the customers from Berlin who bought over 5 items in March.",
            "I need the names of everybody based in Berlin whose March purchases came to more than 5 pieces.",
            "Which customers in Berlin returned more than 5 items in March?",
        ),
        (
            "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
            "In April Natalia sold 48 clips, and in May she sold half of that. How many clips did she sell in total?",
            "What is the sum of the clips that Natalia got rid of over both months, if it was 48 during April and 50% of this number in May?",
            "Natalia sold 48 clips in April and twice as many in May. How many clips did she sell altogether?",
        ),
        (
            "Write a function that returns the longest palindromic substring of a string.",
            "Implement a function which gives back the longest substring of a string that is a palindrome.",
            "Given some text, your code should find the biggest contiguous piece that reads the same in both directions.",
            "Write a function that returns the longest common substring of two strings.",
        ),
        (
            "Find a red cotton shirt in size M that costs less than 30 dollars and buy it.",
            "Look for a red shirt made of cotton, size M, under 30 dollars, and purchase it.",
            "I am after something to wear: a shirt, cotton, red, M. My budget is below 30 dollars. Order one for me.",
            "Find a red cotton skirt in size M that costs less than 30 dollars and buy it.",
        ),
        (
            "Who directed the film in which Marta Keller played the lighthouse keeper?",
            "Who was the director of the movie where Marta Keller played a lighthouse keeper?",
            "Marta Keller once acted as the guardian of a lighthouse. Name the person who made that picture.",
            "Who wrote the music of the film in which Marta Keller played the lighthouse keeper?",
        ),
        (
            "Rename all files in the folder reports so that they begin with the year 2024.",
            "Change the names of all files in the folder reports such that each starts with the year 2024.",
            "Every document under reports should get 2024 as a prefix.",
            "Delete all files in the folder reports that begin with the year 2024.",
        ),
        (
            "Send an email to Priya that the meeting moves to Thursday at 15:00.",
            "Write Priya an email saying that the meeting is moved to Thursday at 15:00.",
            "Let Priya know by mail: we now get together on Thursday, 15:00.",
            "Send an email to Priya that the meeting on Thursday at 15:00 is cancelled.",
        ),
        (
            "What is the capital of the country where the river Drava rises?",
            "Name the capital of the country in which the Drava river has its source.",
            "The Drava springs up in some state. From which city is that state governed?",
            "What is the capital of the country where the river Drava ends?",
        ),
        (
            "Put a clean plate on the dining table.",
            "Place a washed plate onto the dining table.",
            "The table where we eat needs a plate. Make sure that it has been cleaned first.",
            "Put a clean mug on the dining table.",
        ),
        (
            "A train travels 180 km in 2.5 hours. What is its average speed?",
            "A train covers 180 km within 2.5 hours. Calculate its average speed.",
            "How fast does a train go on average when it needs 2.5 hours for 180 km?",
            "A train travels 180 km and stops for 2.5 hours. How long is the whole trip at 90 km/h?",
        ),
        (
            "Turn off the alarm that is set for 7:30 on weekdays.",
            "Disable the 7:30 alarm on weekdays.",
            "From Monday to Friday nothing should wake me at 7:30 any more.",
            "Turn on an alarm at 7:30 on weekdays.",
        ),
        (
            "How many employees of the sales department earn more than their manager?",
            "Count the employees in the sales department with a higher salary than their manager.",
            "In sales, what number of people get paid better than whoever they report to?",
            "How many managers of the sales department earn more than 90,000?",
        ),
        (
            "Fix the bug that makes the login page crash when the password is empty.",
            "Repair the error by which the login page crashes if an empty password is given.",
            "Signing in without typing a password brings the whole page down. Please correct that.",
            "Fix the bug that makes the login page accept an empty password.",
        ),
        (
            "Craft an iron pickaxe from what is in the chest.",
            "Make an iron pickaxe using the things in the chest.",
            "With the contents of the chest as your only material, produce a pickaxe of iron.",
            "Craft an iron sword from what is in the chest.",
        ),
        (
            "Cancel the hotel reservation of Mr Tanaka in Kyoto and refund the deposit.",
            "Cancel Mr Tanaka's hotel booking in Kyoto, and pay back the deposit.",
            "Mr Tanaka will not come to Kyoto after all: drop his room and return what he has paid in advance.",
            "Extend the hotel reservation of Mr Tanaka in Kyoto and charge the deposit.",
        ),
        (
            "Solve for x: 3x + 7 = 22.",
            "Find the value of x in the equation 3x + 7 = 22.",
            "Which number x makes 3x + 7 equal to 22?",
            "Find y if y = 3x + 7 and x = 22.",
        ),
        (
            "Summarise the article about coral reefs in three sentences.",
            "Give a summary of the coral reef article in three sentences.",
            "Boil the text on reefs made by corals down to no more than three sentences.",
            "Translate the article about coral reefs into three languages.",
        ),
        (
            "Heat some water until it boils and measure its temperature.",
            "Warm water up until it is boiling and then measure the temperature.",
            "Bring water to a boil; then tell how many degrees the thermometer shows.",
            "Freeze some water until it is solid and measure its temperature.",
        ),
        (
            "Add a milestone named Beta to the project Heron with a due date of 1 June.",
            "Create a milestone called Beta in the project Heron that is due on 1 June.",
            "Heron needs one more goal, to be reached by 1 June. Its title is Beta.",
            "Close the milestone named Beta of the project Heron that was due on 1 June.",
        ),
        (
            "What year was the composer of the opera The Glass Harbour born?",
            "In which year was the composer of The Glass Harbour, the opera, born?",
            "The Glass Harbour is an opera. When did the person behind its music come into the world?",
            "What year did the composer of the opera The Glass Harbour die?",
        ),
        (
            "Sort the list of tuples by the second element in descending order.",
            "Order a list of tuples descending by their second element.",
            "You get pairs of values. Arrange them so that those with the largest second entry come first.",
            "Sort the list of tuples by the first element in ascending order.",
        ),
        (
            "Which of the 12 sensors reported a temperature above 40 degrees yesterday?",
            "Which of the 12 sensors measured more than 40 degrees yesterday?",
            "Yesterday some of our 12 probes saw heat beyond 40 degrees. Tell me which.",
            "Which of the 12 sensors reported no temperature at all in the last 40 hours?",
        ),
        (
            "Order a large vegetarian pizza without olives to 14 Mill Lane.",
            "Please order one large vegetarian pizza, no olives, to 14 Mill Lane.",
            "Have a big meat-free pizza brought to 14 Mill Lane; nobody here likes olives.",
            "Order a large vegetarian salad with olives to 14 Mill Lane.",
        ),
        (
            "Go to the blue door and open it with the key.",
            "Walk to the blue door and unlock it using the key.",
            "Take the key with you; the door that is blue has to be opened.",
            "Go to the blue box and put the key next to it.",
        ),
        (
            "Janet's ducks lay 16 eggs per day. She eats 3 for breakfast and sells the rest at 2 dollars each. What does she make per day?",
            "Janet has ducks that lay 16 eggs each day. She eats 3 of them at breakfast and sells the others for 2 dollars an egg. How much does she earn daily?",
            "Every day 16 eggs come from the ducks of Janet; 3 end up on her own table, all others bring 2 dollars apiece. Her daily income?",
            "Janet's ducks lay 16 eggs per day. She eats 3 for breakfast and gives 2 to each neighbour. How many neighbours get eggs?",
        ),
        (
            "Reset the password of the user jdoe and send the new one by text message.",
            "Reset user jdoe's password and text the new one.",
            "jdoe cannot get in. Give that account a fresh secret, to be delivered as an SMS.",
            "Lock the account of the user jdoe and send the reason by text message.",
        ),
        (
            "Find the average rating of restaurants in Lyon that serve fish.",
            "What is the mean rating of restaurants in Lyon which serve fish?",
            "Restaurants with fish on the menu, in Lyon only: how do guests score them on average?",
            "Find the highest rated restaurant in Lyon that serves fish.",
        ),
        (
            "Merge the branch feature-x into main and delete it afterwards.",
            "Merge feature-x into main, then delete the branch.",
            "main should contain the work of feature-x, which is no longer needed after that.",
            "Rebase the branch feature-x onto main and push it afterwards.",
        ),
        (
            "How many litres of paint are needed for a wall of 24 square metres if 1 litre covers 8 square metres?",
            "If 1 litre of paint covers 8 square metres, how many litres does a wall of 24 square metres need?",
            "I paint 24 square metres of wall and get 8 square metres done with 1 litre. How much must I buy?",
            "How many square metres does a tin of 24 litres cover if 1 litre is enough for 8 square metres?",
        ),
        (
            "Remove duplicate rows from the table orders and keep the newest of each.",
            "Delete duplicated rows in the table orders, keeping only the newest one.",
            "orders has entries that occur several times. Only the latest version of each should survive.",
            "Copy the newest row of each customer from the table orders to an archive.",
        ),
        (
            "Check whether the museum in Delft is open on Sunday morning.",
            "Find out if the museum in Delft opens on Sunday mornings.",
            "We plan to look at art in Delft before noon on Sunday. Will they let us in?",
            "Check whether the museum in Delft offers tours on Sunday morning.",
        ),
        (
            "Write a unit test for the function parse_date that covers leap years.",
            "Add a unit test of parse_date that covers leap years.",
            "February with 29 days must be handled by parse_date; write something that verifies this.",
            "Write documentation for the function parse_date that explains its time zones.",
        ),
        (
            "Compare the populations of Ghana and Nepal and say which is larger.",
            "Say which population is larger, that of Ghana or that of Nepal.",
            "Do more people live in Nepal or in Ghana?",
            "Compare the areas of Ghana and Nepal and say which is larger.",
        ),
        (
            "Move 250 dollars from my savings account to my checking account.",
            "Transfer 250 dollars from my savings to my checking account.",
            "My checking account should get 250 dollars more, taken out of what I have put aside in savings.",
            "Move 250 dollars from my checking account to my savings account.",
        ),
        (
            "List the open tickets of the team billing that are older than 10 days.",
            "Show all open tickets of the billing team older than 10 days.",
            "Which requests to billing have waited for an answer for over 10 days?",
            "Assign the open tickets of the team billing that are older than 10 days to Kim.",
        ),
        (
            "Plant a seed in the large pot and water it until it grows.",
            "Put a seed into the large pot, and water it until it grows.",
            "Grow something from a seed, in the big pot, by giving it water.",
            "Empty the large pot and fill it with water.",
        ),
        (
            "What is the sum of all even numbers between 1 and 100?",
            "Compute the sum of all even numbers from 1 to 100.",
            "Add up everything divisible by two that lies between 1 and 100.",
            "What is the sum of all odd numbers between 1 and 100?",
        ),
        (
            "Look up the phone number of the pharmacy nearest to the station.",
            "Find the phone number of the pharmacy that is closest to the station.",
            "I stand at the station and have to call a chemist's close by. Which digits do I dial?",
            "Look up the opening hours of the pharmacy nearest to the station.",
        ),
        (
            "Mark every unread message from Lena as important.",
            "Flag all unread messages from Lena as important.",
            "Whatever Lena has sent that I have not opened yet deserves a flag.",
            "Delete every unread message from Lena.",
        ),
    ]
)
