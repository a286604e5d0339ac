"""How many processes generate together where nobody says: from memory, load and measured links."""

from .choice import DegreeChoice, choose, choose_by_memory
