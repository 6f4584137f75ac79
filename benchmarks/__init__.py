"""What is measured, and how. Results lie under `results`, with the machine and the date."""
