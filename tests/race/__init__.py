"""Races: schedules of an asynchronous device are drawn, and every wait in the code is taken out once."""
