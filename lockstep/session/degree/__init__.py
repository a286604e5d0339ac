"""The choice of how many processes generate together if the configuration leaves it open."""

from .choice import DegreeChoice, choose, choose_by_memory
