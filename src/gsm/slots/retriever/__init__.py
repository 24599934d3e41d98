"""Which bank entries an aggregation stage may read: the group `configs/model/retriever/`."""
