"""How a cohort trains: client by client, in worker processes, over ranks; and which engine a job gets."""
