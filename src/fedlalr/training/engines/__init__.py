"""Engines that train a cohort: client by client, in worker processes, over ranks; and how one is chosen."""
