"""What is kept between processes, and what it depends on."""
