"""Run in each of several processes: trains every study of a JSON file, {name: recipe}, by retrofit.pair.run_pair.

python two_processes.py STUDIES FOLDER: the main process is given FOLDER/name, the others FOLDER/others/name, which
must never come to be. What a study is refused for is written to FOLDER/name.<rank>.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from retrofit import evaluate
from retrofit.errors import RetrofitError
from retrofit.pair import run_pair
from retrofit.recipe import parse

if __name__ == "__main__":
    torch.set_num_threads(1)
    studies, folder, rank = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), os.environ["RANK"]
    for name, document in studies.items():
        evaluate._BATCH = document.pop("evaluate", 64)
        try:
            run_pair(parse(document), folder / name if rank == "0" else folder / "others" / name)
        except RetrofitError as error:
            (folder / f"{name}.{rank}").write_text(str(error))
    torch.distributed.destroy_process_group()
