"""How decoder layers read the shared state: the group `configs/model/state_reader/`."""
