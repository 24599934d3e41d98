"""Write a trained model as a folder for transformers: `python export.py checkpoint=logs/default/gsm-seed0 to=out`."""

from gsm.paths import hide_root

hide_root()

from gsm.scripts import export  # noqa: E402

if __name__ == "__main__":
    export()
