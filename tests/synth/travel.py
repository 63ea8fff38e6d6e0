"""Tools of a travel agency, whose results feed each other; and an environment with the same idea."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from ludus.core.failures import ToolFault
from ludus.core.task import Task
from ludus.envs import Env
from ludus.tools import tool


class Flight(TypedDict):
    flight_id: str
    price: float


class Offer(TypedDict):
    offer_code: str
    price: float


class Booking(TypedDict):
    booking_id: str


class Found(TypedDict):
    book_id: str


CITIES = ["Rome", "Oslo", "Lima"]


@tool
def search_flights(city: str, cabin: Literal["economy", "business"] = "economy") -> list[Flight]:
    """Search flights to a city.

    Args:
        city: Where to.
        cabin: Which cabin.
    """
    if city not in CITIES:
        raise ToolFault(f"no airport in {city}")
    return [Flight(flight_id=f"{city[:2].upper()}-{n}", price=100.0 * n) for n in (1, 2)]


@tool
def compare_prices(flight_id: str) -> Offer:
    """Compare the prices of a flight."""
    if "-" not in flight_id:
        raise ToolFault(f"there is no flight {flight_id}")
    return Offer(offer_code=f"{flight_id}/x", price=90.0)


@tool
async def book(offer_code: str, passengers: int) -> Booking:
    """Book an offer."""
    if "/" not in offer_code:
        raise ToolFault("no such offer")
    return Booking(booking_id=f"B{offer_code}{passengers}")


@tool
def send_itinerary(booking_id: str, email: str) -> str:
    """Send the itinerary of a booking."""
    return f"sent {booking_id} to {email}"


@tool
def find_hotels(city: str, stars: int | None = None) -> list[str]:
    """Find hotels in a city. A city may have none."""
    return ["Grand"] if city == "Rome" else []


TOOLS = [search_flights, compare_prices, book, send_itinerary, find_hotels]
VALUES = {"city": CITIES, "email": ["a@example.org", "b@example.org"], "passengers": [1, 2, 3]}


class Library(Env):
    """Books that are found, borrowed and returned; a book that is out cannot be borrowed."""

    async def reset(self, task: Task) -> str:
        self.out: set[str] = set()
        return "A library."

    @tool
    async def find_book(self, title: str) -> Found:
        """Find a book.

        Args:
            title: Its title.
        """
        return Found(book_id=f"b-{title}")

    @tool
    async def borrow(self, book_id: str) -> Booking:
        """Borrow a book.

        Args:
            book_id: Which one.
        """
        if book_id in self.out:
            raise ToolFault("it is out")
        self.out.add(book_id)
        return Booking(booking_id=f"loan-{book_id}")
