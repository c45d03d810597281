import sys

from tilewright.trainer.config.config import main

sys.exit(main())
