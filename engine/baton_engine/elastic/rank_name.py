"""The format of a rank's name, which ranks and the coordinator validate."""

import re

#: A DNS label, as in the name of a pod.
RANK_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
