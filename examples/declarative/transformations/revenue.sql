-- Made anew by every run, of all orders that there are.
CREATE MATERIALIZED VIEW revenue AS
SELECT country, count(*) AS orders, round(sum(amount), 2) AS amount
FROM orders
GROUP BY country;
