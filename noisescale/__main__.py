# SPDX-License-Identifier: Apache-2.0
"""`python -m noisescale`: the command line, where its script is not on the path."""

from noisescale.cli.app import main

if __name__ == "__main__":
    main()
