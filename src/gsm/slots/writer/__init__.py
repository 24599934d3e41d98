"""How retrieved history enters the shared state: the group `configs/model/writer/`."""
