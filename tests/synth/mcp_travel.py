"""An MCP server made with the SDK, over stdio: what its tools return are pydantic models, lists and scalars."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel

server = MCPServer("travel")


class Flight(BaseModel):
    flight_id: str
    price: float


class Offer(BaseModel):
    offer_code: str
    flight: Flight


class Quote(BaseModel):
    best: Offer | None = None
    others: list[Offer] = []


class Passenger(BaseModel):
    name: str
    age: int


@server.tool()
def search_flights(city: str) -> list[Flight]:
    """Search flights to a city."""
    return [Flight(flight_id=f"{city[:2].upper()}-{n}", price=n) for n in (1, 2)]


@server.tool()
def quote(flight_id: str) -> Quote:
    """Ask what a flight costs."""
    offer = Offer(offer_code=f"{flight_id}/x", flight=Flight(flight_id=flight_id, price=90))
    return Quote(best=offer, others=[offer])


@server.tool()
def book(offer_code: str, passenger: Passenger) -> str:
    """Book an offer."""
    return f"{offer_code}/{passenger.name}"


@server.tool()
def find_booking_code(city: str) -> str:
    """Find the code of a booking."""
    return "77"


@server.tool()
def cancel(booking_code: str) -> bool:
    """Cancel a booking."""
    return booking_code == "77"


@server.tool()
def list_hotel_names(city: str) -> list[str]:
    """List hotels."""
    return [f"{city} Plaza", "1999"]


@server.tool()
def nearest_exits(city: str) -> list[int]:
    """List exits."""
    return [7]


if __name__ == "__main__":
    server.run("stdio")
