"""How measurements are ordered, compared and reported: pairs, intervals of paired differences, figures and JSON."""
