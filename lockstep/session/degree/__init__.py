"""The choice of how many processes generate together if the configuration leaves it open."""

from .choice import choose_generator_tp, choose_generator_tp_by_memory
