-- Every run computes it again, from all orders.
CREATE MATERIALIZED VIEW revenue AS
SELECT country, count(*) AS orders, round(sum(amount), 2) AS amount
FROM orders
GROUP BY country;
