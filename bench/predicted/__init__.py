"""Predicts times of goals' cases from counts, without a GPU: `roofs` has a device's rates,
`launches` what a call launches, `model` the arithmetic. `bench.predict` has the command.
"""
