"""The selection of bank entries for aggregation stages: the group `configs/model/retriever/`."""
