"""One worker that `train` started: `python -m matcha.distributed.launch.worker JOB`."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from matcha.distributed.launch.main import report_error, show_links
from matcha.distributed.train import train_job
from matcha.errors import ExchangeError, MatchaError


def main(file: Path) -> None:
    """Train this worker's part of the job in a file."""
    job, network, shown, options = pickle.loads(file.read_bytes())
    on_record = None
    if os.environ["RANK"] == "0":
        on_record = pickle.loads(shown)
        show_links()
    try:
        train_job(job, network, on_record=on_record, **options)
    except ExchangeError:
        raise
    except MatchaError as error:  # a sentence that needs no traceback
        report_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
